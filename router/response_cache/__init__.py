"""Answers to requests that were answered before: kept in this router's memory, or in Redis.

cached_responses.py   which requests, under which key; the race of a look-up with computing
cache_store.py        a store in memory
redis_store.py        a store that routers share, over redis_connection.py
"""
