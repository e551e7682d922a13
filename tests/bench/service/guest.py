"""The HTTP server in the sandbox of `make bench-service`: /small is a line, /bytes/N is N bytes. It keeps connections open, and has no thread
for each of them, so that a new connection is cheap."""

import asyncio

PORT = 8000
SMALL = b"small\n"
BLOCK = b"0123456789abcdef" * 4096


def head(length):
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % length


async def answer(path, writer):
    if path == b"/small":
        writer.write(head(len(SMALL)) + SMALL)
    elif path.startswith(b"/bytes/"):
        blocks, rest = divmod(int(path.removeprefix(b"/bytes/")), len(BLOCK))
        writer.write(head(blocks * len(BLOCK) + rest))
        for _ in range(blocks):
            writer.write(BLOCK)
            await writer.drain()
        writer.write(BLOCK[:rest])
    else:
        writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
    await writer.drain()


async def serve(reader, writer):
    try:
        while True:
            request = await reader.readuntil(b"\r\n\r\n")
            await answer(request.split(b" ", 2)[1], writer)
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def main():
    server = await asyncio.start_server(serve, "0.0.0.0", PORT)
    await server.serve_forever()


asyncio.run(main())
