"""Draws the picture of a bench where what draws is installed."""

from gpufaas.errors import CommandError
from gpufaas.output.optional_pictures import load_pictures


def draw_picture(module: str, path: object, *content: object) -> None:
    """Have the module's `draw` write a picture of the content, and say where, or why not."""
    try:
        load_pictures()  # sets the style
        load_pictures(module).draw(*content, path)
    except CommandError as error:
        print(f"no picture: {error}")
    else:
        print(f"\npicture: {path}")
