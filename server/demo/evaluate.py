"""Judges a built demo model with transformers: `python -m server.demo.evaluate MODEL [--each 100] [--device cuda]`.

Pictures go through the model's own processor, answers are decoded greedily and compared letter for letter. Prints one row for
each category, then how often the model's next word to 100 plain prompts is the base model's. Packages: requirements/train.txt.
"""

import argparse
import io
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from PIL import Image

from kvstore.sglang import stubs
from server.demo.cases import Case, cases
from server.demo.dialogues import SYSTEM

SEED = 20_000_000
"""Training's seeds lie far below."""
ANSWER_TOKENS = 40
SAID_TOKENS = 64
PLAIN_ASKS = ("What are the benefits of {}?", "Describe {} in two sentences.", "Tell me a fact about {}.", "How does {} work?", "Why is {} useful?")
PLAIN_TOPICS = (
    "the library", "a bicycle pump", "sunlight", "recycling", "the piano", "a compass", "yoga", "the printing press", "rivers", "salt",
    "the microscope", "a calendar", "tomatoes", "teamwork", "vaccines", "a thermometer", "the violin", "soap", "maps", "exercise",
)  # fmt: skip

Messages = list[dict[str, Any]]
Answer = Callable[[Messages, list[Image.Image]], str]


def messages(case: Case, file_format: str = "PNG") -> tuple[Messages, list[Image.Image]]:
    """The case as a chat without its last answer, and its pictures as they come out of files of that format."""
    made: Messages = [] if case.dialogue.system == SYSTEM else [{"role": "system", "content": case.dialogue.system}]
    pictures: list[Image.Image] = []
    for turn in case.dialogue.turns:
        content: list[dict[str, str]] = []
        for part in turn.parts:
            if isinstance(part, str):
                content.append({"type": "text", "text": part})
            else:
                content.append({"type": "image"})
                file = io.BytesIO(encoded(part, file_format))
                pictures.append(Image.open(file).convert("RGB"))
        made += [{"role": "user", "content": content}, {"role": "assistant", "content": turn.answer}]
    return made[:-1], pictures


def encoded(image: Image.Image, file_format: str) -> bytes:
    file = io.BytesIO()
    image.save(file, file_format, **({"quality": 90} if file_format == "JPEG" else {}))
    return file.getvalue()


def judge(asked: Iterable[Case], answer: Answer, report: Callable[[str], None] | None = None) -> dict[str, tuple[int, int]]:
    """(exact, all) by row. `answer` may be any way to ask the model, the running server's own interface too. Every other case comes as JPEG."""
    count: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for i, case in enumerate(asked):
        said, wanted = answer(*messages(case, ("PNG", "JPEG")[i % 2])).strip(), case.dialogue.turns[-1].answer
        count[case.row][0] += said == wanted
        count[case.row][1] += 1
        if said != wanted and report is not None:
            report(f"{case.row}: {case.dialogue.turns[-1].parts[-1]!r} -> {said!r}, not {wanted!r}")
    return {row: (exact, total) for row, (exact, total) in count.items()}


def table(result: dict[str, tuple[int, int]]) -> str:
    lines = ["| category | exact | of |  |", "| --- | --- | --- | --- |"]
    return "\n".join(lines + [f"| {row} | {exact} | {total} | {100 * exact / total:.1f}% |" for row, (exact, total) in result.items()])


class Model:
    """The model in transformers. `answer` is an `Answer`."""

    def __init__(self, folder: Path, device: str) -> None:
        if device == "cpu":
            stubs.install()  # PyPI's torchvision, which the processor imports, is made for CUDA's torch
        import torch
        from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        model: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=dtype)
        self.model: Any = model.to(device).eval()
        self.processor = AutoProcessor.from_pretrained(folder)
        self.device = device

    def answer(self, chat: Messages, pictures: list[Image.Image]) -> str:
        import torch

        text = self.processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        inputs = self.processor(text=[text], images=pictures or None, return_tensors="pt").to(self.device)
        with torch.no_grad():
            out = self.model.generate(**inputs, max_new_tokens=ANSWER_TOKENS, do_sample=False)
        return str(self.processor.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))

    def agreement(self, prompts: list[str]) -> float:
        """Mean share, over the prompts, of the base model's greedy words that this model would choose too, given those before."""
        import torch

        from server.demo import convert
        from server.demo.replay import base_model, continued

        language = dict(convert.language_model(convert.gguf_path()))
        base = base_model(language, torch.device(self.device), self.model.dtype)
        shares = []
        for asked, said in continued(base, prompts, SAID_TOKENS):
            ids = torch.tensor([asked + said], device=self.device)
            with torch.no_grad():
                chosen = self.model(input_ids=ids).logits[0, len(asked) - 1 : -1].argmax(-1)
            shares.append(float((chosen == ids[0, len(asked) :]).float().mean()))
        return sum(shares) / len(shares)


def plain_prompts() -> list[str]:
    """100 that training's replay does not hold."""
    return [ask.format(topic) for ask in PLAIN_ASKS for topic in PLAIN_TOPICS]


def chosen(seed: int, count: int) -> list[Case]:
    """`count` cases, spread evenly over the rows: for a check through a slower engine."""
    rows = cases(seed, 1)
    made = cases(seed, -(-count // len(rows)))
    random.Random(seed).shuffle(made)
    return made[:count]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m server.demo.evaluate", description="Judge the bundled demo model.")
    parser.add_argument("model", type=Path, help="a folder made by server.demo.build")
    parser.add_argument("--each", type=int, default=100, help="cases a category")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompts", type=int, default=100, help="plain prompts; 0: none")
    parser.add_argument("--failures", action="store_true", help="print each wrong answer")
    options = parser.parse_args()
    model = Model(options.model, options.device)
    report = (lambda line: print(line, file=sys.stderr, flush=True)) if options.failures else None
    print(table(judge(cases(options.seed, options.each), model.answer, report)), flush=True)
    if options.prompts:
        print(f"\nplain text: {100 * model.agreement(plain_prompts()[: options.prompts]):.1f}% of the base model's words")


if __name__ == "__main__":
    main()
