"""Where keys and values live: the paged pool, the prefix tree over it and the decode slots."""
