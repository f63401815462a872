"""The words of the little world: who lives in it, where, with what; and what is always true there.

Small on purpose: a model of four million parameters has to learn every word from a few million tokens. Each word is
meant to become one token, so that copying it from a story is one step of attention.
"""

NAMES = (
    "Pip", "Mia", "Tom", "Lily", "Ben", "Anna", "Max", "Rosa", "Finn", "Nora", "Leo", "Ruby", "Sam", "Ella", "Hugo",
    "Zoe", "Otto", "Clara", "Jack", "Ivy", "Noah", "Lucy", "Oscar", "Daisy", "Felix", "Wanda", "Bruno", "Greta",
    "Milo", "Tess", "Kofi", "Amina", "Yuki", "Ravi",
)  # fmt: skip
KINDS = (
    "fox", "bear", "rabbit", "mouse", "cat", "dog", "duck", "frog", "owl", "hen", "goat", "pig", "horse", "wolf",
    "lion", "turtle", "bird", "cow", "sheep", "squirrel", "monkey", "dragon", "tiger", "bee",
)  # fmt: skip
PLACES = (
    "forest", "garden", "cave", "barn", "village", "castle", "valley", "tower", "meadow", "city", "jungle", "desert",
    "mill", "tent", "park", "school", "kitchen", "harbour", "field", "house",
)  # fmt: skip
THINGS = (
    "ball", "hat", "kite", "book", "drum", "boat", "lamp", "key", "cup", "bell", "scarf", "coat", "doll", "ring",
    "map", "coin", "flute", "blanket", "bag", "spoon", "clock", "pencil", "button", "mirror",
)  # fmt: skip
COLOURS = ("red", "blue", "green", "yellow", "white", "black", "brown", "pink", "orange", "purple", "grey", "golden")
FEELINGS_BAD = ("sad", "angry", "afraid", "worried", "lonely", "tired", "hungry", "cold")
FEELINGS_GOOD = ("happy", "proud", "calm", "glad", "brave", "thankful", "cheerful", "excited")
FEELINGS = FEELINGS_BAD + FEELINGS_GOOD
SPOTS = (
    "under the bed", "in the box", "behind the door", "on the roof", "under the stone", "in the basket",
    "behind the tree", "on the table", "under the bridge", "in the river", "behind the wall", "on the hill",
    "in the well", "under the chair", "on the shelf", "in the grass",
)  # fmt: skip
FOODS = ("cake", "pie", "soup", "bread", "cheese", "honey", "rice", "jam", "milk", "salad", "porridge", "pudding")
FRUITS = (
    "apples", "pears", "plums", "nuts", "eggs", "carrots", "lemons", "cherries", "berries", "beans", "cookies",
    "shells",
)  # fmt: skip
WEATHERS = ("sunny", "rainy", "windy", "snowy", "cloudy", "foggy", "stormy", "warm")
NUMBERS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
)  # fmt: skip
HOBBIES = (
    "sing", "dance", "swim", "paint", "read", "climb", "run", "cook", "sleep", "jump", "fish", "draw", "write", "dig",
    "skate", "sew",
)  # fmt: skip

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
SOUNDS = {
    "cow": "moo", "dog": "woof", "cat": "meow", "duck": "quack", "sheep": "baa", "pig": "oink", "horse": "neigh",
    "lion": "roar", "bee": "buzz", "mouse": "squeak", "frog": "croak", "owl": "hoot", "hen": "cluck", "wolf": "howl",
    "bird": "tweet",
}  # fmt: skip
BABIES = {
    "dog": "puppy", "cat": "kitten", "cow": "calf", "sheep": "lamb", "horse": "foal", "duck": "duckling",
    "hen": "chick", "lion": "cub", "pig": "piglet", "goat": "kid", "frog": "tadpole", "owl": "owlet",
}  # fmt: skip
LEGS = {
    "dog": "four", "cat": "four", "cow": "four", "horse": "four", "bird": "two", "duck": "two", "hen": "two",
    "owl": "two", "bee": "six", "ant": "six", "spider": "eight", "snake": "zero", "fish": "zero", "fox": "four",
}  # fmt: skip
NATURAL_COLOURS = {
    "grass": "green", "snow": "white", "the sky": "blue", "a banana": "yellow", "coal": "black", "a lemon": "yellow",
    "milk": "white", "a carrot": "orange", "a cherry": "red", "a plum": "purple", "an elephant": "grey",
    "a flamingo": "pink", "chocolate": "brown", "blood": "red", "the sun": "yellow", "the sea": "blue",
}  # fmt: skip
OPPOSITES = {
    "big": "small", "hot": "cold", "up": "down", "day": "night", "fast": "slow", "happy": "sad", "wet": "dry",
    "new": "old", "open": "closed", "full": "empty", "light": "dark", "soft": "hard", "early": "late", "long": "short",
    "loud": "quiet", "high": "low", "good": "bad", "left": "right", "young": "old", "clean": "dirty", "thick": "thin",
    "heavy": "light", "strong": "weak", "near": "far", "rich": "poor", "sweet": "sour", "first": "last",
}  # fmt: skip
GROUPS = {
    "fox": "animal", "bear": "animal", "wolf": "animal", "tiger": "animal", "apple": "fruit", "pear": "fruit",
    "plum": "fruit", "lemon": "fruit", "cherry": "fruit", "carrot": "vegetable", "bean": "vegetable",
    "potato": "vegetable", "onion": "vegetable", "red": "colour", "blue": "colour", "green": "colour",
    "Monday": "day", "Friday": "day", "Sunday": "day", "April": "month", "June": "month", "March": "month",
    "drum": "instrument", "flute": "instrument", "piano": "instrument", "violin": "instrument", "chair": "furniture",
    "table": "furniture", "bed": "furniture", "hat": "clothing", "coat": "clothing", "scarf": "clothing",
}  # fmt: skip
USES = {
    "key": "open a door", "spoon": "eat soup", "book": "read a story", "lamp": "see at night",
    "boat": "cross the water", "pencil": "write a word", "clock": "tell the time", "map": "find the way",
    "blanket": "stay warm", "cup": "drink milk", "bell": "make a sound", "broom": "sweep the floor",
    "needle": "sew a coat", "ladder": "climb up high", "umbrella": "stay dry", "bag": "carry things",
}  # fmt: skip

SLOTS: dict[str, tuple[str, ...]] = {
    "who": NAMES,
    "pal": NAMES,
    "kind": KINDS,
    "place": PLACES,
    "thing": THINGS,
    "colour": COLOURS,
    "feeling": FEELINGS,
    "spot": SPOTS,
    "food": FOODS,
    "fruit": FRUITS,
    "weather": WEATHERS,
    "n": NUMBERS,
    "hobby": HOBBIES,
    "animal": tuple(dict.fromkeys([*SOUNDS, *BABIES, *LEGS])),
    "sound": tuple(SOUNDS.values()),
    "baby": tuple(BABIES.values()),
    "legs": ("zero", "two", "four", "six", "eight"),
    "stuff": tuple(NATURAL_COLOURS),
    "word": tuple(dict.fromkeys([*OPPOSITES, *OPPOSITES.values()])),
    "opposite": tuple(dict.fromkeys([*OPPOSITES, *OPPOSITES.values()])),
    "day": DAYS,
    "next_day": DAYS,
    "month": MONTHS,
    "next_month": MONTHS,
    "member": tuple(GROUPS),
    "group": tuple(dict.fromkeys(GROUPS.values())),
    "tool": tuple(USES),
    "use": tuple(USES.values()),
    "a": tuple(map(str, range(21))),
    "b": tuple(map(str, range(21))),
    "sum": tuple(map(str, range(41))),
    "difference": tuple(map(str, range(21))),
}
