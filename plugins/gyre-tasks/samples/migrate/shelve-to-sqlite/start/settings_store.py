"""Settings of many users, pickled in a shelf."""

import shelve


class Settings:
    def __init__(self, path):
        self.shelf = shelve.open(path, writeback=True)

    def set(self, user, key, value):
        self.shelf.setdefault(user, {})[key] = value

    def get(self, user, key, default=None):
        return self.shelf.get(user, {}).get(key, default)

    def all(self, user):
        return dict(self.shelf.get(user, {}))

    def remove(self, user, key=None):
        if key is None:
            self.shelf.pop(user, None)
        else:
            self.shelf.get(user, {}).pop(key, None)

    def users(self):
        return sorted(user for user in self.shelf if self.shelf[user])

    def with_value(self, key, value):
        return [user for user in self.users() if self.shelf[user].get(key) == value]

    def close(self):
        self.shelf.close()
