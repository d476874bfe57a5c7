"""An MCP server for tests, on stdin and stdout."""

from __future__ import annotations

from mcp.server import MCPServer

server = MCPServer("notes")
notes: list[str] = []


@server.tool()
def note(text: str) -> str:
    """Keeps a note, and tells how many there are."""
    notes.append(text)
    return f"{len(notes)} notes"


@server.tool()
def fail() -> str:
    """Fails."""
    raise ValueError("no such note")


if __name__ == "__main__":
    server.run("stdio")
