"""Fetches pages with callbacks. A `transport(url, done, failed)` calls one of the two when it is ready."""


class Fetcher:
    def __init__(self, transport, retries=2):
        self.transport, self.retries = transport, retries
        self.cache = {}

    def fetch(self, url, done, failed):
        """The page of one address; a failure is tried again."""
        if url in self.cache:
            done(self.cache[url])
            return
        left = [self.retries]

        def arrived(page):
            self.cache[url] = page
            done(page)

        def missed(error):
            if left[0] == 0:
                failed(error)
                return
            left[0] -= 1
            self.transport(url, arrived, missed)

        self.transport(url, arrived, missed)

    def fetch_all(self, urls, done, failed):
        """All pages in the order of `urls`, or the first failure."""
        pages = [None] * len(urls)
        missing = [len(urls)]
        over = [False]
        if not urls:
            done([])

        def keeper(place):
            def keep(page):
                pages[place] = page
                missing[0] -= 1
                if missing[0] == 0 and not over[0]:
                    done(pages)

            return keep

        def fail(error):
            if not over[0]:
                over[0] = True
                failed(error)

        for place, url in enumerate(urls):
            self.fetch(url, keeper(place), fail)

    def first(self, urls, done, failed):
        """The page that arrives first; fails when all fail."""
        over, left = [False], [len(urls)]

        def arrived(page):
            if not over[0]:
                over[0] = True
                done(page)

        def missed(error):
            left[0] -= 1
            if left[0] == 0 and not over[0]:
                failed(error)

        for url in urls:
            self.fetch(url, arrived, missed)
