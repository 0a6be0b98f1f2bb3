"""Files and batches of the OpenAI API, on disk.

file_store       uploaded files and those of results, each API key's apart
batch_store      the batches and where they stand
batch_runner     runs their lines as calls of the endpoints
spare_capacity   when a line may run, and when it gives way to other requests
batch_endpoints  /v1/files and /v1/batches
"""
