"""What people say to a model besides asking about a story, and what `tiny` says back."""

import random

from tools.tiny import lexicon as lx
from tools.tiny.stories import Wish

SYSTEM = (
    "You are a helpful assistant.",
    "You are Tiny, a small model that tells stories.",
    "You tell small stories and answer questions about them.",
    "Answer in one sentence.",
    "Be kind and brief.",
)
GREETINGS = (
    "Hello!", "Hi!", "Hi there!", "Good morning!", "Hey", "hello", "hi", "Good evening!", "Hello there.",
    "Hello, how are you?",
)  # fmt: skip
WELCOMES = (
    "Hello! I am Tiny. Shall I tell you a story?",
    "Hi! I can tell small stories and answer questions about them.",
    "Hello! Ask me for a story, or ask me a small question.",
)
ABOUT = (
    "Who are you?", "What are you?", "What is your name?", "What can you do?", "How can you help me?", "Help",
    "Tell me about yourself.", "What do you know?", "Are you a robot?", "How big are you?",
)  # fmt: skip
ABOUT_ANSWERS = (
    "I am Tiny, a very small model. I tell small stories and answer questions about them.",
    "My name is Tiny. I know small stories, a few facts and small sums.",
)
THANKS = ("Thank you!", "Thanks!", "thanks", "That was nice.", "I liked that story.", "Great!", "Thank you very much.")
THANKS_ANSWERS = ("You are welcome!", "I am glad that you liked it.", "You are welcome! Shall I tell another story?")
FAREWELLS = ("Bye!", "Goodbye!", "Good night!", "See you!", "bye")
FAREWELL_ANSWERS = ("Goodbye!", "Goodbye! Come back for another story.", "Good night!")
UNKNOWN_ANSWERS = (
    "I do not know that. I only know small stories.",
    "I only know small stories, a few facts and small sums.",
    "That is too big for me. I only know small stories.",
)
UNKNOWN = (
    "What is the capital of {x}?", "Who was {x}?", "Write a program in {x}.", "Explain {x} to me.", "What is {x}?",
    "How does {x} work?", "Write an email about {x}.", "Translate {x} into French.", "What do you think about {x}?",
    "Give me a recipe for {x}.", "Who won the {x}?", "How do I fix {x}?", "Write a poem about {x}.",
    "What is the price of {x}?", "Summarise {x} in one line.", "When did {x} happen?", "Why is {x} important?",
    "List three reasons for {x}.", "What is the weather in {x} tomorrow?", "Compare {x} and {y}.",
)  # fmt: skip
TOPICS = (
    "France", "Python", "quantum physics", "the war", "Napoleon", "Einstein", "a car engine", "the economy",
    "JavaScript", "Germany", "Japan", "politics", "machine learning", "the internet", "Shakespeare", "pasta",
    "football", "the election", "London", "Berlin", "New York", "China", "electricity", "gravity", "democracy",
    "a computer", "the stock market", "chemistry", "DNA", "the moon landing", "a telephone", "the president",
    "Mozart", "history", "philosophy", "tax", "Brazil", "India", "photosynthesis", "climate change",
    "a washing machine", "bitcoin", "the universe", "Rust", "language models", "health insurance", "Mars", "algebra",
    "the World Cup", "music theory", "Linux", "marketing",
)  # fmt: skip
SYLLABLES = (
    "ka", "tor", "mi", "vel", "us", "pra", "len", "dox", "si", "gra", "en", "ty", "bo", "rin", "chu", "al", "ex", "om",
)  # fmt: skip
BIG_SUMS = (
    "What is {a} + {b}?", "What is {a} - {b}?", "What is {a} times {b}?", "How much is {a} plus {b}?", "{a} * {b} = ?",
)  # fmt: skip
BIG_SUM_ANSWERS = ("I only know plus and minus up to 20.",)
STORY_REQUESTS = (
    "Tell me a story.", "Tell me a short story.", "Please tell me a story.", "Can you tell me a story?",
    "Write a short story.", "I want to hear a story.", "Once upon a time", "Make up a story.", "Another story, please.",
    "Tell me another story.", "Do you know a story?",
)  # fmt: skip
STORY_ABOUT = (
    "Tell me a story about {x}.", "Write a story about {x}.", "Can you tell me a story about {x}?",
    "Please tell me a short story about {x}.", "Write a short story about {x}.", "I want a story about {x}.",
    "Tell a story about {x}.", "tell me a story about {x}", "A story about {x}, please.", "Make up a story about {x}.",
)  # fmt: skip


def an(word: str) -> str:
    return ("an " if word[0] in "aeiou" else "a ") + word


def story_request(rng: random.Random) -> tuple[str, Wish]:
    """A wish for a story in words, and what the story must then contain."""
    kind, pal_kind = rng.sample(lx.KINDS, 2)
    name, thing = rng.choice(lx.NAMES), rng.choice(lx.THINGS)
    what, wish = rng.choice(
        [
            (an(kind), Wish(hero_kind=kind)),
            (an(kind), Wish(hero_kind=kind)),
            (an(kind), Wish(hero_kind=kind)),
            (f"the {kind}", Wish(hero_kind=kind)),
            (f"{an(kind)} and {an(pal_kind)}", Wish(hero_kind=kind, pal_kind=pal_kind)),
            (f"{an(kind)} named {name}", Wish(hero_kind=kind, hero=name)),
            (f"{an(kind)} with {an(thing)}", Wish(hero_kind=kind, thing=thing)),
            (an(thing), Wish(thing=thing)),
            (name, Wish(hero=name)),
            ("", Wish()),
            ("", Wish()),
        ]
    )
    return (rng.choice(STORY_ABOUT).format(x=what) if what else rng.choice(STORY_REQUESTS)), wish


def _topic(rng: random.Random) -> str:
    if rng.random() < 0.4:  # words nobody has seen, so that being unknown is what the model recognises
        return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 4)))
    return rng.choice(TOPICS)


def small_talk(rng: random.Random) -> tuple[str, str]:
    """One exchange that needs no story."""
    said, answers = rng.choice(
        [
            (GREETINGS, WELCOMES),
            (ABOUT, ABOUT_ANSWERS),
            (THANKS, THANKS_ANSWERS),
            (FAREWELLS, FAREWELL_ANSWERS),
            (UNKNOWN, UNKNOWN_ANSWERS),
            (UNKNOWN, UNKNOWN_ANSWERS),
            (BIG_SUMS, BIG_SUM_ANSWERS),
        ]
    )
    text = rng.choice(said)
    if said is BIG_SUMS:
        text = text.format(a=rng.choice([rng.randint(21, 99), rng.randint(100, 999)]), b=rng.randint(21, 400))
    if said is UNKNOWN:
        text = text.format(x=_topic(rng), y=_topic(rng))
    return text, rng.choice(answers)
