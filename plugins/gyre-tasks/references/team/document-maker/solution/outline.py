def outline(tree, depth=0):
    lines = []
    for number, (title, below) in enumerate(tree, 1):
        lines.append(f"{'  ' * depth}{number}. {title}")
        lines += outline(below, depth + 1)
    return lines
