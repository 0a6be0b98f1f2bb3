"""The HTTP edge, in the shapes that clients of the OpenAI and Anthropic APIs know, as a call passes
it.

http_server         uvicorn on the router's event loop, one bounded connection a client
http_app            API keys, routes, the page at /, and the endpoints that generate nothing
endpoint            one call that generates, from its body, within limits, to its last byte
request_model       base of all bodies: strict types, errors with the field's path
generation_request  fields of all generations
completion_request  fields of answers with choices, and the body of /v1/completions
chat_request        bodies of /v1/chat/completions, /tokenize and /detokenize
answer_renderer     from an answer's events to bytes, for any API
choice_renderer     chats and completions: answers are choices
block_renderer      answers that are rows of blocks, as in messages/ and responses/
messages            the Anthropic API
responses           the OpenAI API's responses, and those that are stored
batches             the OpenAI API's files and batches, on disk
admin_endpoints     models and adapters, added and removed
http_errors         statuses and bodies of errors
answer_types        types of answers
openapi             a route with its part of the document; the document of all
"""
