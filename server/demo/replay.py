"""What the base model says to plain prompts, and how likely it found each word: the trainer holds the demo model's text chat to it."""

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from server.demo.dialogues import SYSTEM
from server.demo.encoding import tokenizer
from server.demo.network import HEAD, KEY_HEADS, LAYERS, TEXT_EPSILON, TEXT_HEADS, TEXT_THETA, WIDTH
from server.demo.packing import Replay

KEPT = 32
"""Likeliest next tokens kept for each place."""
END = 2
ASKS = (
    "What is {}?", "Tell me about {}.", "Explain {} to a child.", "Write a short poem about {}.", "Give me three facts about {}.",
    "Why do people like {}?", "How do I learn about {}?", "What do you think of {}?", "Write one sentence about {}.", "Who knows most about {}?",
    "Where can I find {}?", "What is the history of {}?", "List some words that go with {}.", "Is {} important?", "Translate {} into French.",
    "What is the opposite of {}?",
)  # fmt: skip
TOPICS = (
    "France", "the sun", "gravity", "cats", "music", "the telephone", "pizza", "the ocean", "Python programming", "history", "electricity",
    "winter", "mathematics", "a healthy diet", "the Moon", "friendship", "dogs", "trains", "the Roman Empire", "coffee", "photosynthesis",
    "football", "poetry", "computers", "rain", "volcanoes", "Shakespeare", "bread", "the human heart", "whales", "money", "democracy",
    "Japan", "rockets", "gardens", "chess", "dreams", "the number seven", "sleep", "bicycles", "books", "painting", "bees", "Egypt",
    "the internet", "mountains", "chocolate", "time", "robots", "a good job", "the weather", "Africa", "dinosaurs", "tea", "the stars",
    "cooking", "swimming", "language", "love", "fire", "glass", "islands", "honey", "the economy",
)  # fmt: skip


@dataclass(slots=True)
class Texts:
    replay: Replay
    likely: Tensor
    """(tokens, KEPT): ids of the likeliest tokens at each place, by the base model that has read all before it."""
    shares: Tensor
    """(tokens, KEPT): their probabilities, which sum to 1."""

    def save(self, path: str) -> None:
        torch.save([*map(torch.from_numpy, self.replay), self.likely, self.shares], path)

    @classmethod
    def load(cls, path: str, device: torch.device) -> "Texts":
        ids, starts, prompt, likely, shares = torch.load(path)
        return cls(Replay(ids.numpy(), starts.numpy(), prompt.numpy()), likely.to(device), shares.to(device))


def base_model(language: dict[str, Tensor], device: torch.device, dtype: torch.dtype) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(language["embed_tokens.weight"]), hidden_size=WIDTH, intermediate_size=1536, num_hidden_layers=LAYERS, num_attention_heads=TEXT_HEADS,
        num_key_value_heads=KEY_HEADS, head_dim=HEAD, rms_norm_eps=TEXT_EPSILON, max_position_embeddings=8192, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": TEXT_THETA}, bos_token_id=1, eos_token_id=END, pad_token_id=END,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    model.model.load_state_dict({name: weight.float() for name, weight in language.items()})
    return model.to(device, dtype).eval()


def prompt_ids(prompt: str) -> list[int]:
    return tokenizer().encode(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False).ids


@torch.no_grad()
def continued(model: Any, prompts: list[str], tokens: int, batch: int = 512) -> list[tuple[list[int], list[int]]]:
    """(prompt, greedy answer with its end if it came) in ids, for each prompt."""
    device, out = next(model.parameters()).device, []
    for first in range(0, len(prompts), batch):
        asked = [prompt_ids(p) for p in prompts[first : first + batch]]
        longest = max(map(len, asked))
        ids = torch.tensor([[END] * (longest - len(a)) + a for a in asked], device=device)
        mask = torch.tensor([[0] * (longest - len(a)) + [1] * len(a) for a in asked], device=device)
        made = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=END)[:, longest:].tolist()
        for a, answer in zip(asked, made, strict=True):
            out.append((a, answer[: answer.index(END) + 1] if END in answer else answer))
    return out


@torch.no_grad()
def texts(language: dict[str, Tensor], device: torch.device, dtype: torch.dtype, tokens: int = 96, prompts: int | None = None) -> Texts:
    asks = [ask.format(topic) for topic, ask in product(TOPICS, ASKS)][:prompts]
    model = base_model(language, device, dtype)
    said = continued(model, asks, tokens)
    starts = np.cumsum([0, *(len(p) + len(a) for p, a in said)])
    replay = Replay(np.concatenate([np.array(p + a, np.int32) for p, a in said]), starts, np.array([len(p) for p, _ in said]))
    likely, shares = [], []
    for first in range(0, len(said), 32):
        rows = [p + a for p, a in said[first : first + 32]]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [END] * (longest - len(row)) for row in rows], device=device)
        hidden = model.model(input_ids=ids, use_cache=False)[0]
        for row, states in zip(rows, hidden, strict=True):
            top, which = model.lm_head(states[: len(row)]).float().log_softmax(-1).topk(KEPT, -1)
            likely.append(which.int())
            shares.append(top.softmax(-1))
    # The prediction at a place is for the token after it; keep it in the row of the token that it predicts.
    return Texts(replay, torch.cat(likely).roll(1, 0), torch.cat(shares).roll(1, 0))
