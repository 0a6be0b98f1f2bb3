# pip: lm-eval[api]
"""lm-eval with the server's tokenizer: answers of chats and of texts, and choices by their
likelihood, as text and as token ids. Prints an answer a line."""

import sys

import lm_eval
from datasets import Dataset
from lm_eval.tasks import TaskManager

address, model = sys.argv[1:3]
QUESTION = "What is the capital of France?"
START = "The capital of France is"
OWN_TASKS = TaskManager(include_defaults=False)
CITIES = [" Paris.", " Berlin.", " London."]


def rows(**_: object) -> dict[str, Dataset]:
    row = {"question": QUESTION, "start": START, "cities": CITIES, "right": 0}
    return {"test": Dataset.from_list([row])}


def task(name: str, kind: str, text: str, **more: object) -> dict[str, object]:
    common = {"task": name, "output_type": kind, "custom_dataset": rows, "test_split": "test"}
    return {**common, "doc_to_text": text, **more}


def generating(name: str, text: str, until: list[str], target: str) -> dict[str, object]:
    kwargs = {"until": until, "max_gen_toks": 20}
    metric = [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]
    more = {"generation_kwargs": kwargs, "doc_to_target": target, "metric_list": metric}
    return task(name, "generate_until", text, **more)


def evaluate(kind: str, path: str, one: dict[str, object], **more: object) -> dict[str, object]:
    """What lm-eval noted of the task's only question."""
    arguments = {"base_url": f"{address}/v1/{path}", "model": model, "num_concurrent": 2}
    found = lm_eval.simple_evaluate(
        kind,
        {**arguments, **more.pop("arguments", {})},
        tasks=[one],
        task_manager=OWN_TASKS,
        bootstrap_iters=0,
        **more,
    )
    (sample,) = found["samples"][one["task"]]
    return sample


whole = generating("chat", "{{question}}", ["\n"], f"{START} Paris.")
asked = evaluate("local-chat-completions", "chat/completions", whole, apply_chat_template=True)
print(asked["filtered_resps"][0])

continued = generating("text", "{{start}}", ["."], " Paris")
for tokenized in (True, False):
    arguments = {"tokenizer_backend": "remote", "tokenized_requests": tokenized}
    sample = evaluate("local-completions", "completions", continued, arguments=arguments)
    print(f"{START}{sample['filtered_resps'][0]}.")
    choice = task(
        *("choice", "multiple_choice", "{{start}}"),
        doc_to_choice="{{cities}}",
        doc_to_target="{{right}}",
        target_delimiter="",
    )
    sample = evaluate("local-completions", "completions", choice, arguments=arguments)
    likelihoods = [likelihood for likelihood, _ in sample["filtered_resps"]]
    print(f"{START}{CITIES[likelihoods.index(max(likelihoods))]}")
