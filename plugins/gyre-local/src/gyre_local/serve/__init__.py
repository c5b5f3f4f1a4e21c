"""The embedded engine: calls, the batch scheduler, its thread and the asyncio face."""
