"""The router: takes requests at its edges, runs them on workers, streams answers. No torch.

The packages, in the order in which a request passes them:

    edges      gRPC and HTTP: authenticate, parse, write answers at the client's pace
    requests   serve one request: wait queue, attempts, retries
    prompts    chat template, tokenizer, output grammar
    response_cache  answers to earlier requests
    placement  choose workers: snapshot, policy, scorer, cost model
    workers    a link per worker, membership, health, the controller
    answers    tokens to text: detokenizer, stop strings, reasoning, tool calls
    observe    ledger, metrics, trends, diagnosis

served_models.py holds these parts for each model, and finds a model by name.

The files that a gRPC request passes, in order:

    edges/grpc/servicers.py, edges/auth.py, edges/grpc/protobuf.py
    requests/serving.py, prompts/text.py, requests/answering.py, response_cache/
    requests/dispatch.py, requests/admission.py, requests/wait_queue.py
    placement/placer.py, placement/policy.py, requests/attempt.py, workers/link.py

and its tokens, on their way back:

    workers/link.py, requests/inbox.py, requests/dispatch.py, requests/attempt.py
    answers/answer.py, edges/client_buffer.py, edges/grpc/servicers.py
"""
