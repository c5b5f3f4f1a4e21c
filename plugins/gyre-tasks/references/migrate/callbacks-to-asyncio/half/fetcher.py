class Fetcher:
    def __init__(self, transport, retries=2):
        self.transport, self.retries = transport, retries
        self.cache = {}

    async def fetch(self, url):
        if url in self.cache:
            return self.cache[url]
        for left in range(self.retries, -1, -1):
            try:
                self.cache[url] = await self.transport(url)
                return self.cache[url]
            except Exception:
                if left == 0:
                    raise

    async def fetch_all(self, urls):
        return [await self.fetch(url) for url in urls]
