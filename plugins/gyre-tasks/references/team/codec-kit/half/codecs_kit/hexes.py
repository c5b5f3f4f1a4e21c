def encode(text):
    return text.encode().hex()


def decode(text):
    try:
        return bytes.fromhex(text).decode()
    except UnicodeDecodeError as error:
        raise ValueError("not UTF-8") from error
