"""A cache on standard input: SET KEY VALUE [TTL], GET KEY, TICK SECONDS, STATS. cache.py SIZE."""

import sys
from collections import OrderedDict


class Cache:
    def __init__(self, size):
        self.size, self.now = size, 0
        self.entries = OrderedDict()
        self.hits = self.misses = self.evicted = 0

    def expire(self):
        for key in [key for key, (_, end) in self.entries.items() if end is not None and end < 0]:
            del self.entries[key]

    def set(self, key, value, ttl=None):
        self.expire()
        self.entries.pop(key, None)
        self.entries[key] = (value, None if ttl is None else self.now + ttl)
        while len(self.entries) > self.size:
            self.entries.popitem(last=False)
            self.evicted += 1

    def get(self, key):
        self.expire()
        if key not in self.entries:
            self.misses += 1
            return None
        self.hits += 1
        self.entries.move_to_end(key)
        return self.entries[key][0]


def answer(cache, words):
    if words[0] == "SET" and len(words) in (3, 4):
        cache.set(words[1], words[2], int(words[3]) if len(words) == 4 else None)
        return "OK"
    if words[0] == "GET" and len(words) == 2:
        value = cache.get(words[1])
        return "MISS" if value is None else f"HIT {value}"
    if words[0] == "TICK" and len(words) == 2:
        cache.now += int(words[1])
        return "OK"
    if words == ["STATS"]:
        return f"{len(cache.entries)} entries {cache.hits} hits {cache.misses} misses {cache.evicted} evicted"
    return "ERR"


if __name__ == "__main__":
    cache = Cache(int(sys.argv[1]))
    for line in sys.stdin:
        try:
            print(answer(cache, line.split() or [""]), flush=True)
        except ValueError:
            print("ERR", flush=True)
