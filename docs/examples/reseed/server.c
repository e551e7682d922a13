/*
 * C with OpenSSL 3: a server that inotify tells of a thaw. It needs no hook. `cc server.c -lcrypto`
 *
 * GET /key is a key, and GET /upstream an answer of the service at $UPSTREAM (HOST:PORT).
 */
#include <err.h>
#include <netdb.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/socket.h>
#include <unistd.h>

#include <openssl/rand.h>

static int generation;
static int upstream = -1;

static void watch_generation(void) {
    generation = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
    if (generation < 0 || inotify_add_watch(generation, "/run/thaw/generation", IN_MODIFY) < 0)
        err(1, "/run/thaw/generation");
}

/*
 * Call this before each use of what clones must not share. It costs one system call. The file changes before a clone goes on, so
 * the event is there by then.
 */
static void renew_if_thawed(void) {
    char events[4096];
    if (read(generation, events, sizeof events) <= 0)
        return;
    if (RAND_poll() != 1) /* from the kernel; the generators of all threads follow */
        errx(1, "OpenSSL has no seed");
    if (upstream >= 0)
        close(upstream);
    upstream = -1; /* the next use connects again */
}

static int connect_upstream(void) {
    char place[256];
    snprintf(place, sizeof place, "%s", getenv("UPSTREAM") ? getenv("UPSTREAM") : "");
    char *port = strrchr(place, ':');
    if (!port)
        errx(1, "UPSTREAM is HOST:PORT");
    *port++ = 0;
    struct addrinfo wanted = {.ai_socktype = SOCK_STREAM}, *found;
    if (getaddrinfo(place, port, &wanted, &found) != 0)
        return -1;
    int connection = socket(found->ai_family, found->ai_socktype, 0);
    if (connection >= 0 && connect(connection, found->ai_addr, found->ai_addrlen) != 0) {
        close(connection);
        connection = -1;
    }
    freeaddrinfo(found);
    return connection;
}

/* Each answers with the length of the text that it writes, or with 0 if it fails. */
static size_t ask_upstream(char *text, size_t size) {
    if (upstream < 0)
        upstream = connect_upstream();
    if (upstream < 0 || write(upstream, "ping\n", 5) != 5)
        return 0;
    size_t length = 0;
    while (length == 0 || text[length - 1] != '\n') {
        ssize_t more = read(upstream, text + length, size - length);
        if (more <= 0)
            return 0;
        length += more;
    }
    return length;
}

static size_t make_key(char *text) {
    unsigned char key[32];
    if (RAND_bytes(key, sizeof key) != 1)
        return 0;
    for (size_t i = 0; i < sizeof key; i++)
        sprintf(text + 2 * i, "%02x", key[i]);
    text[2 * sizeof key] = '\n';
    return 2 * sizeof key + 1;
}

static void answer(int client) {
    char request[1024], text[256];
    ssize_t length = read(client, request, sizeof request - 1);
    if (length <= 0)
        return;
    request[length] = 0;
    renew_if_thawed();
    size_t body = 0;
    if (strncmp(request, "GET /key ", 9) == 0)
        body = make_key(text);
    else if (strncmp(request, "GET /upstream ", 14) == 0)
        body = ask_upstream(text, sizeof text);
    dprintf(client, "HTTP/1.0 %s\r\nContent-Length: %zu\r\n\r\n%.*s", body ? "200 OK" : "500 Failed", body, (int)body, text);
}

int main(void) {
    signal(SIGPIPE, SIG_IGN);
    watch_generation();
    int listener = socket(AF_INET, SOCK_STREAM, 0), yes = 1;
    struct sockaddr_in here = {.sin_family = AF_INET, .sin_port = htons(8000)};
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (bind(listener, (struct sockaddr *)&here, sizeof here) != 0 || listen(listener, 16) != 0)
        err(1, "port 8000");
    for (;;) {
        int client = accept(listener, NULL, NULL);
        if (client < 0)
            continue;
        answer(client);
        close(client);
    }
}
