"""A plain function without a GPU: says hello."""

import json


def handle(event, context):
    """Greets whoever the body names: text, or JSON with `name`."""
    text = event.body.decode("utf-8", "replace").strip()
    try:
        name = json.loads(text)["name"]
    except (ValueError, TypeError, KeyError):
        name = text
    return {"statusCode": 200, "body": {"hello": name or "world", "from": context.hostname}}
