from outline import outline
from table import table
from wrap import wrap


def document(title, text, rows, tree, width=40):
    blocks = [[title, "=" * len(title)], wrap(text, width), table(rows), outline(tree)]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"
