"""Settings of many users, as JSON in SQLite."""

import contextlib
import json
import sqlite3


class Settings:
    def __init__(self, path):
        self.db = sqlite3.connect(path)
        self.db.execute(
            "CREATE TABLE IF NOT EXISTS settings (user TEXT, key TEXT, value TEXT NOT NULL, PRIMARY KEY (user, key))"
        )
        self.db.execute("CREATE INDEX IF NOT EXISTS by_value ON settings (key, value)")

    def set(self, user, key, value):
        self.db.execute("INSERT OR REPLACE INTO settings VALUES (?, ?, ?)", (user, key, _text(value)))

    def get(self, user, key, default=None):
        row = self.db.execute("SELECT value FROM settings WHERE user = ? AND key = ?", (user, key)).fetchone()
        return json.loads(row[0]) if row else default

    def all(self, user):
        rows = self.db.execute("SELECT key, value FROM settings WHERE user = ?", (user,))
        return {key: json.loads(value) for key, value in rows}

    def remove(self, user, key=None):
        if key is None:
            self.db.execute("DELETE FROM settings WHERE user = ?", (user,))
        else:
            self.db.execute("DELETE FROM settings WHERE user = ? AND key = ?", (user, key))

    def users(self):
        return [user for (user,) in self.db.execute("SELECT DISTINCT user FROM settings ORDER BY user")]

    def with_value(self, key, value):
        query = "SELECT user FROM settings WHERE key = ? AND value = ? ORDER BY user"
        return [user for (user,) in self.db.execute(query, (key, _text(value)))]

    def close(self):
        self.db.close()


def _text(value):
    return json.dumps(value)
