"""Answers to requests that were answered before: kept in this router's memory, or in Redis.

response_keys.py      which requests, under which key; which questions are compared
cached_responses.py   responses to the same request; the race of a look-up with computing
semantic_cache.py     responses to similar questions, which similar_questions.py finds in Redis
verification.py       whether the served model agrees that two questions ask the same
shadow.py             what these would have answered, and a report of it
cache_store.py        a store in memory, and a response as bytes
redis_store.py        a store that routers share, over redis_connection.py
"""
