import com.sun.net.httpserver.HttpExchange;
import com.sun.net.httpserver.HttpServer;
import java.io.BufferedReader;
import java.io.FileInputStream;
import java.io.IOException;
import java.io.InputStreamReader;
import java.net.InetSocketAddress;
import java.net.Socket;
import java.nio.ByteBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.SecureRandom;
import java.util.HexFormat;
import java.util.Random;

/**
 * Java 17: a server that compares the generation file before each use of what clones must not share. It needs no hook.
 *
 * GET /key is a key, GET /id a random number that is no secret, and GET /upstream an answer of the service at $UPSTREAM (HOST:PORT).
 */
public class Server {
    private static final Path GENERATION = Path.of("/run/thaw/generation");

    private final SecureRandom keys;
    private final Random ids = new Random();
    private Socket upstream;
    private BufferedReader answers;
    /** The generation for which all of these are. */
    private String seen;

    private Server() throws Exception {
        keys = SecureRandom.getInstance("DRBG");
        seen = Files.readString(GENERATION);
    }

    public static void main(String[] arguments) throws Exception {
        Server server = new Server();
        HttpServer http = HttpServer.create(new InetSocketAddress(8000), 0);
        http.createContext("/", server::answer);
        http.start();
    }

    private synchronized void answer(HttpExchange exchange) throws IOException {
        renewIfThawed();
        String page = switch (exchange.getRequestURI().getPath()) {
            case "/key" -> key();
            case "/id" -> HexFormat.of().toHexDigits(ids.nextLong());
            case "/upstream" -> askUpstream();
            default -> null;
        };
        byte[] body = (page == null ? "not found\n" : page + "\n").getBytes();
        exchange.sendResponseHeaders(page == null ? 404 : 200, body.length);
        exchange.getResponseBody().write(body);
        exchange.close();
    }

    private void renewIfThawed() throws IOException {
        String now = Files.readString(GENERATION);
        if (now.equals(seen)) {
            return;
        }
        // Not reseed(): it takes the seed from another generator of this process, which clones share as well.
        keys.setSeed(kernelRandom(32));
        ids.setSeed(ByteBuffer.wrap(kernelRandom(Long.BYTES)).getLong());
        if (upstream != null) {
            upstream.close();
            upstream = null; // the next use connects again
        }
        seen = now;
    }

    private static byte[] kernelRandom(int length) throws IOException {
        try (FileInputStream kernel = new FileInputStream("/dev/urandom")) {
            return kernel.readNBytes(length);
        }
    }

    private String key() {
        byte[] key = new byte[32];
        keys.nextBytes(key);
        return HexFormat.of().formatHex(key);
    }

    private String askUpstream() throws IOException {
        if (upstream == null) {
            String place = System.getenv("UPSTREAM");
            int colon = place.lastIndexOf(':');
            upstream = new Socket(place.substring(0, colon), Integer.parseInt(place.substring(colon + 1)));
            answers = new BufferedReader(new InputStreamReader(upstream.getInputStream()));
        }
        upstream.getOutputStream().write("ping\n".getBytes());
        return answers.readLine();
    }
}
