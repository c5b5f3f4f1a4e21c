"""KV-cache layouts, transfer plans, transports and live migration."""
