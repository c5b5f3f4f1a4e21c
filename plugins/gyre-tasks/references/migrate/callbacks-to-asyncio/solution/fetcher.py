"""Fetches pages with asyncio. `await transport(url)` gives the page or raises."""

import asyncio


class Fetcher:
    def __init__(self, transport, retries=2):
        self.transport, self.retries = transport, retries
        self.cache = {}
        self._running = {}

    async def fetch(self, url):
        """The page of one address; a failure is tried again. Concurrent calls share one fetch."""
        if url in self.cache:
            return self.cache[url]
        if url not in self._running:
            task = asyncio.ensure_future(self._fetch(url))
            self._running[url] = task
            task.add_done_callback(lambda _: self._running.pop(url, None))
        return await asyncio.shield(self._running[url])

    async def _fetch(self, url):
        for left in range(self.retries, -1, -1):
            try:
                self.cache[url] = await self.transport(url)
                return self.cache[url]
            except Exception:
                if left == 0:
                    raise

    async def fetch_all(self, urls):
        """All pages in the order of `urls`, or the first failure."""
        tasks = [asyncio.ensure_future(self.fetch(url)) for url in urls]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def first(self, urls):
        """The page that arrives first; fails when all fail."""
        tasks = [asyncio.ensure_future(self.fetch(url)) for url in urls]
        error = ValueError("no addresses")
        try:
            for next_one in asyncio.as_completed(tasks):
                try:
                    return await next_one
                except Exception as failure:
                    error = failure
            raise error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
