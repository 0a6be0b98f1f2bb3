"""The HTTP edge: the OpenAI and Anthropic APIs. Modules in the order in which a call passes them:

http_server         uvicorn on the router's event loop, one bounded connection a client
http_app            API keys, routes, the page at /, and endpoints that do not generate
endpoint            one generating call, from its body to its last byte
body                receives and decodes a body, within limits
request_model       base of all bodies: strict types, errors with the field's path
generation_request  fields of all generations
completion_request  fields of answers with choices, and the body of /v1/completions
chat_request        bodies of /v1/chat/completions, /tokenize and /detokenize
answer_renderer     turns an answer's events into bytes; base of all APIs
choice_renderer     chats and completions: answers are choices
block_renderer      messages and responses: answers are sequences of blocks
messages            the Anthropic API
responses           the OpenAI Responses API, with stored responses
embeddings          /v1/embeddings
batches             the OpenAI API's files and batches, on disk
admin_endpoints     adding and removing models and adapters
http_errors         statuses and bodies of errors
answer_types        types of answers
openapi             routes with their OpenAPI operations; the whole document
"""
