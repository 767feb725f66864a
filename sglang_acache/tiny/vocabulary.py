"""The words of the bundled model, by role. Their order fixes the token ids, so append, never reorder."""


def _listed(text: str) -> list[str]:
    return text.split()


SLOTS = _listed("one two three four five six")

NAMES = _listed("alice bob carol david emma frank grace henry iris jack karen liam mona noah olive peter")

PLACES = _listed(
    "kitchen garden cellar attic harbor market library station museum bakery chapel forest bridge tower castle school"
)

VERBS = _listed(
    "follows amuses awaits bores charms delights fits flatters helps inspires interests pleases "
    "serves suits worries puzzles"
)

OBJECTS = _listed(
    "lamp key apple book chair clock coat coin cup drum fan flag flute fork glass glove hat horn "
    "jar kite knife ladder lemon letter map mirror nail needle paint paper pear pen piano pipe plate "
    "plum pot purse radio ring rope ruler saddle scarf shell shirt shoe skate soap spoon stamp stool "
    "sword table tent ticket torch towel trumpet vase violin wagon wallet wheel"
)

FACTS_OPEN, FACTS_CLOSE = "Facts:", "Done."
UPDATES_OPEN, ANSWER_OPEN = "Updates:", "Answer:"

# What a question asks for, by task name: the word that opens the question.
QUESTION_WORDS = {"hop": "Where:", "kv": "Who:", "upd": "Home:", "echo": "Echo:"}

ROLES = _listed("system user assistant")

# Words of system turns and of text put before a request; they carry no information.
FILLER = _listed(
    "you are a helpful careful and please answer the question with short words read all text "
    "first then reply in order hello this is some shared context"
)

WORDS: list[str] = [
    *SLOTS, *NAMES, *PLACES, *VERBS, *OBJECTS,
    FACTS_OPEN, FACTS_CLOSE, UPDATES_OPEN, ANSWER_OPEN, *QUESTION_WORDS.values(),
    *ROLES, *FILLER,
]  # fmt: skip

BOS, EOS, MASK, UNKNOWN = "<|startoftext|>", "<|endoftext|>", "<|mdm_mask|>", "<|unknown|>"
HEADER_OPEN, HEADER_CLOSE, TURN_END = "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"
SPECIALS: list[str] = [UNKNOWN, BOS, EOS, MASK, HEADER_OPEN, HEADER_CLOSE, TURN_END]

TOKEN_IDS: dict[str, int] = {word: i for i, word in enumerate([*WORDS, *SPECIALS])}

# Rows of the embedding. The rows above the last token are padding, as in the published LLaDA.
VOCAB_SIZE = 256


def encode(text: str) -> list[int]:
    """Token ids of space-separated `text`: what the saved tokenizer gives for the same text."""
    unknown = TOKEN_IDS[UNKNOWN]
    return [TOKEN_IDS.get(word, unknown) for word in text.split()]
