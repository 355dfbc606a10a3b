"""A reward that an untrained model earns about half of the time, so that a few steps already move its weights."""


def even_length(prompt: str, completion: str, **columns: object) -> float:
    return float(len(completion) % 2 == 0)
