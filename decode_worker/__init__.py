"""Phase two: reserves pages, admits arrived requests, streams tokens."""
