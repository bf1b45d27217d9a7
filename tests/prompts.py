"""The prompts that every equality test runs: what people send, and the lengths at which engines go wrong."""

from __future__ import annotations

from typing import Any

BLOCK_SIZE = 16
CHUNK_TOKENS = 512

CHATS = {
    "chat_capital": ["What is the capital of France?"],
    "chat_list": ["Name three fruits that grow on trees, one per line."],
    "chat_maths": ["I have 12 eggs and use 5. How many are left? Explain in one sentence."],
    "chat_turns": ["Who wrote Hamlet?", "William Shakespeare wrote Hamlet.", "When was he born?"],
}
TEXTS = {
    "one_token": "The",
    "two_tokens": "Once upon",
    "code_python": 'def fibonacci(n: int) -> int:\n    """The n-th Fibonacci number."""\n',
    "code_c": "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n",
    "code_sql": "SELECT customer.name, SUM(orders.total) FROM customer JOIN",
    "json": '{"name": "Ada", "languages": ["French", "English"], "born":',
    "german": "Die Hauptstadt von Deutschland ist",
    "french": "Le petit chat noir dort sur",
    "spanish": "En un lugar de la Mancha, de cuyo nombre",
    "chinese": "中国的首都是北京，日本的首都是",
    "russian": "Москва является столицей",
    "emoji": "Weather report: 🌧️ today, 🌞 tomorrow, and then",
}
LENGTHS = (
    *(2 * BLOCK_SIZE + d for d in (-1, 0, 1)),
    *(16 * BLOCK_SIZE + d for d in (-1, 0, 1)),
    *(k * CHUNK_TOKENS + d for k in (1, 2) for d in (-1, 0, 1)),
    2050,
)

_TOWNS = ("Aldermoor", "Brackwater", "Corvane", "Dunmarsh", "Eastering", "Fallowby", "Greyhithe")
_TRADES = ("weavers", "millers", "shipwrights", "printers", "clockmakers")


def long_text(num_entries: int = 90) -> str:
    """A chronicle in which no two entries are equal; each is some 30 tokens."""
    entries = [
        f"In the year {1700 + 3 * i}, the town of {_TOWNS[i % 7]} counted {i * i + 41} houses and {5 * i + 2} "
        f"{_TRADES[i % 5]}, and the river rose {i % 13 + 1} feet above the old bridge."
        for i in range(num_entries)
    ]
    return "A chronicle of the seven towns.\n" + "\n".join(entries)


def prompt_token_ids(tokenizer: Any) -> dict[str, list[int]]:
    """Every prompt by name, as token ids of a transformers tokenizer with a chat template."""
    prompts: dict[str, list[int]] = {}
    for name, turns in CHATS.items():
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
        prompts[name] = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    for name, text in TEXTS.items():
        prompts[name] = list(tokenizer.encode(text, add_special_tokens=False))
    chronicle = tokenizer.encode(long_text(), add_special_tokens=False)
    for length in LENGTHS:
        assert len(chronicle) >= length
        prompts[f"length_{length}"] = list(chronicle[:length])
    return prompts
