def parse(tokens):
    left = list(tokens)
    tree = _sum(left)
    if left:
        raise ValueError(f"unexpected {left[0][1]}")
    return tree


def _next(left):
    return left[0][1] if left and left[0][0] == "sign" else None


def _sum(left):
    tree = _product(left)
    while _next(left) in ("+", "-"):
        sign = left.pop(0)[1]
        tree = (sign, tree, _product(left))
    return tree


def _product(left):
    tree = _unary(left)
    while _next(left) in ("*", "/"):
        sign = left.pop(0)[1]
        tree = (sign, tree, _unary(left))
    return tree


def _unary(left):
    if _next(left) == "-":
        left.pop(0)
        return ("neg", _unary(left))
    return _power(left)


def _power(left):
    base = _atom(left)
    if _next(left) == "^":
        left.pop(0)
        return ("^", base, _unary(left))
    return base


def _atom(left):
    if not left:
        raise ValueError("unexpected end")
    kind, value = left.pop(0)
    if kind == "number":
        return value
    if value == "(":
        tree = _sum(left)
        if _next(left) != ")":
            raise ValueError("missing )")
        left.pop(0)
        return tree
    raise ValueError(f"unexpected {value}")
