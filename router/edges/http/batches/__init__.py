"""Files and batches of the OpenAI API, on disk.

file_store       uploaded files and result files, separate for each API key
batch_store      batches and their status
batch_runner     runs their lines as calls of the endpoints
spare_capacity   when a line may run, and when it gives way to other requests
batch_endpoints  /v1/files and /v1/batches
"""
