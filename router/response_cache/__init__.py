"""Answers to earlier requests, kept in this router's memory or in Redis.

response_keys.py      which requests are cached, under which key; which questions are compared
cached_responses.py   responses to the same request; the race of a look-up with computing
semantic_cache.py     responses to similar questions, which similar_questions.py finds in Redis
verification.py       asks the served model whether two questions ask the same
shadow.py             records what the semantic cache would have answered, and reports it
cache_store.py        a store in memory, and the encoding of a response
redis_store.py        a store that routers share, over redis_connection.py
"""
