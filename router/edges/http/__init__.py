"""The HTTP front door, in the shapes that clients of the OpenAI API know.

fields       one kind of field each: how it is read, how OpenAPI describes it
generation   what chats and completions have in common, and what is not served
structure    what an answer is asked to read as
tools        tools, in calls and in answers
chat         /v1/chat/completions: messages in, choices out
completions  /v1/completions: prompts in, choices out
tokens       /tokenize and /detokenize
overview     what operators look at: /v1/cluster, diagnosis, trends, requests
logprobs     log probabilities as either endpoint tells them
answers      from the events of an answer to what is sent
static       the page at /, whose files are in page/
body         a call's body, read with care
endpoint     one call that generates, from its body to its last byte
app          the other endpoints, and all routes
errors       statuses and bodies of errors
schemas      the parts that its schemas are made of
openapi      the document that describes all this, made of the same fields
server       uvicorn on the router's own event loop

Only body, endpoint, app, errors, overview, static and server need starlette or uvicorn.
"""
