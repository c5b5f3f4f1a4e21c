def evaluate(tree):
    if isinstance(tree, float):
        return tree
    sign, *parts = tree
    values = [evaluate(part) for part in parts]
    if sign == "neg":
        return -values[0]
    left, right = values
    if sign == "+":
        return left + right
    if sign == "-":
        return left - right
    if sign == "*":
        return left * right
    if sign == "^":
        return left**right
    if right == 0:
        raise ValueError("division by zero")
    return left / right
