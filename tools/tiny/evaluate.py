"""What the exported model can do on what it was never trained on, run through transformers.

    python -m tools.tiny.evaluate src/millrace/bundled/tiny --json results.json

Four measurements, every item held out by the hash of its content: the letter of multiple choice questions, sampled
answers about stories against the grammar and the facts, sums in words, and stories told on request. The targets are
stated with the results; a missed one is printed as missed.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.tiny.grammar import agrees, holds, parse, parse_story
from tools.tiny.items import LETTERS, Question, lasting_facts, sums
from tools.tiny.shares import Share, count
from tools.tiny.talk import story_request
from tools.tiny.world import held_out_exam, held_out_question, held_out_sum

TARGETS = {"choices": 0.60, "answers_parse": 0.95, "answers_agree": 0.80}
LABELS = {
    "choices": "multiple choice, all",
    "choices_story": "- about a held-out story",
    "choices_fact": "- about a lasting fact, held-out options",
    "choices_sum": "- about a held-out sum",
    "answers_parse": "sampled answers in the grammar",
    "answers_agree": "sampled answers that agree with the story",
    "answers_right": "- and answer what was asked",
    "sums_right": "held-out sums, greedy, in words",
    "stories_parse": "sampled stories wholly in the grammar",
    "stories_wish": "- and about what was asked for",
}
Messages = list[dict[str, str]]


class Subject:
    """The exported folder as transformers opens it, in float32 on the CPU."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.tokenizer.padding_side = "left"
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def letters(self, prompts: list[str]) -> list[str]:
        """The likeliest of " A" to " D" after each prompt."""
        ids = [self.tokenizer.encode(" " + x, add_special_tokens=False)[0] for x in LETTERS]
        batch = self.tokenizer(prompts, return_tensors="pt", padding=True)
        with torch.no_grad():
            logits = self.model(**_inputs(batch), logits_to_keep=1).logits[:, -1, ids]
        return [LETTERS[i] for i in logits.argmax(-1).tolist()]

    def reply(self, chats: list[Messages], *, sample: bool, seed: int = 0, most: int = 200) -> list[str]:
        """The assistant's next message in each chat; sampled as generation_config.json says, or greedy."""
        texts = [self.tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in chats]
        batch = self.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        torch.manual_seed(seed)
        how = {} if sample else {"do_sample": False, "temperature": None, "top_p": None}
        out = self.model.generate(**_inputs(batch), max_new_tokens=most, **how)
        new = out[:, batch["input_ids"].shape[1] :]
        return [str(text).strip() for text in self.tokenizer.batch_decode(new, skip_special_tokens=True)]


def _inputs(batch: Any) -> dict[str, torch.Tensor]:
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}


def chat(said: str) -> Messages:
    return [{"role": "user", "content": said}]


def measure_choices(subject: Subject, n: int) -> dict[str, Share]:
    """Accuracy over held-out choices, in all and by category; by chance it would be a quarter."""
    exams = [held_out_exam(seed) for seed in range(n)]
    chosen = [x for i in range(0, n, 50) for x in subject.letters([e.prompt for e in exams[i : i + 50]])]
    outcomes = [(e.category, e.choice.letter == c) for e, c in zip(exams, chosen, strict=True)]
    found = {"choices": count([right for _, right in outcomes])}
    for category in ("story", "fact", "sum"):
        found[f"choices_{category}"] = count([right for c, right in outcomes if c == category])
    return found


def measure_answers(subject: Subject, n: int) -> tuple[dict[str, Share], list[str]]:
    """Sampled answers about held-out stories: in the grammar, true by the facts, and to the point; some as examples."""
    items = [held_out_question(seed) for seed in range(n)]
    chats = [chat(f"{story.text}\n{question.text}") for story, question in items]
    answers = [x for i in range(0, n, 50) for x in subject.reply(chats[i : i + 50], sample=True, seed=i)]
    true: list[bool] = []
    right: list[bool] = []
    examples: list[str] = []
    for (story, question), answer in zip(items, answers, strict=True):
        true.append(agrees(answer, (*story.facts, *lasting_facts(), *sums())))
        right.append(true[-1] and _is_to_the_point(answer, question))
        if len(examples) < 5 or (not true[-1] and len(examples) < 10):
            examples.append(f"{story.text} {question.text} -> {answer}")
    found = {
        "answers_parse": count([parse(a) is not None for a in answers]),
        "answers_agree": count(true),
        "answers_right": count(right),
    }
    return found, examples


def _is_to_the_point(answer: str, question: Question) -> bool:
    """Whether some sentence of the answer states the fact that was asked for, with the slot that was asked for."""
    claims = {c for reading in parse(answer) or [] for c in reading}
    return any(holds(c, [question.fact]) and (question.slot, question.value) in c.slots for c in claims)


def measure_sums(subject: Subject, n: int) -> dict[str, Share]:
    """Held-out sums asked in the chat, greedy: the sentence must be exactly right."""
    questions = [held_out_sum(seed) for seed in range(n)]
    chats = [chat(q.text) for q in questions]
    answers = [x for i in range(0, n, 50) for x in subject.reply(chats[i : i + 50], sample=False, most=40)]
    return {"sums_right": count([a == q.answer for a, q in zip(answers, questions, strict=True)])}


def measure_stories(subject: Subject, n: int) -> tuple[dict[str, Share], list[str]]:
    """Stories on request: every sentence in the grammar, and the wished-for hero or thing in them."""
    wishes = [story_request(random.Random(f"evaluation wish {seed}")) for seed in range(n)]
    chats = [chat(said) for said, _ in wishes]
    told = [x for i in range(0, n, 50) for x in subject.reply(chats[i : i + 50], sample=True, seed=i)]
    in_grammar, as_wished = [], []
    for (_, wish), story in zip(wishes, told, strict=True):
        wanted = [w for w in (wish.hero_kind, wish.pal_kind, wish.hero, wish.thing) if w]
        in_grammar.append(parse_story(story) is not None)
        as_wished.append(in_grammar[-1] and all(w in story for w in wanted))
    examples = [f"{said} -> {story}" for (said, _), story in list(zip(wishes, told, strict=True))[:4]]
    return {"stories_parse": count(in_grammar), "stories_wish": count(as_wished)}, examples


def evaluate(folder: Path, scale: float = 1.0) -> tuple[dict[str, Share], list[str]]:
    """All measurements and some examples; `scale` below 1 takes fewer items, for a quick look."""
    subject = Subject(folder)
    found = measure_choices(subject, int(2000 * scale))
    answers, answer_examples = measure_answers(subject, int(200 * scale))
    stories, story_examples = measure_stories(subject, int(100 * scale))
    return found | answers | measure_sums(subject, int(100 * scale)) | stories, answer_examples + story_examples


def report(found: dict[str, Share]) -> list[str]:
    """One line per figure, with its target where it has one."""
    lines = []
    for name, share in found.items():
        target = TARGETS.get(name)
        verdict = "" if target is None else f"; target {target:.0%}: {'met' if share.share >= target else 'MISSED'}"
        lines.append(f"{LABELS[name]}: {share}{verdict}")
    return lines


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Evaluate an exported `tiny` on held-out items.")
    parser.add_argument("folder", type=Path, help="exported model, e.g. src/millrace/bundled/tiny")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the items, for a quick look")
    parser.add_argument("--examples", action="store_true", help="also print some answers")
    a = parser.parse_args(arguments)
    found, examples = evaluate(a.folder, a.scale)
    print("\n".join(report(found)))
    if a.examples:
        print("\n".join(examples))
    if a.json:
        a.json.write_text(json.dumps({name: share.as_json() for name, share in found.items()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
