def table(rows):
    if not rows:
        return []
    if len({len(row) for row in rows}) > 1:
        raise ValueError("rows of different length")
    widths = [max(len(str(cell)) for cell in column) for column in zip(*rows)]
    return ["  ".join(_cell(cell, width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def _cell(cell, width):
    return str(cell).rjust(width) if isinstance(cell, (int, float)) else str(cell).ljust(width)
