def encode(text):
    parts, at = [], 0
    while at < len(text):
        end = at
        while end < len(text) and text[end] == text[at] and end - at < 9:
            end += 1
        parts.append(f"{end - at}{text[at]}")
        at = end
    return "".join(parts)


def decode(text):
    if len(text) % 2 or any(c not in "123456789" for c in text[::2]):
        raise ValueError("not a run-length code")
    return "".join(int(n) * c for n, c in zip(text[::2], text[1::2]))
