//! Files go into a sandbox and out of it, by `thaw cp` and by the API, and mean what they mean to `docker cp`.

#![allow(clippy::unwrap_used)]

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use thaw_e2e::home::Home;
use thaw_e2e::{Outcome, image, run};

/// A node with a sandbox called `box`.
struct Place {
    home: Home,
    thawd: Child,
}

impl Place {
    fn new(flags: &[&str]) -> Place {
        let home = Home::new();
        let thawd = home.thawd(&[]);
        let busybox = image("busybox");
        let arguments = [
            &["run", "-d", "--name", "box"],
            flags,
            &[&busybox, "sleep", "100000"],
        ]
        .concat();
        run(&mut home.thaw(&arguments)).ok();
        Place { home, thawd }
    }

    fn copy(&self, arguments: &[&str]) -> Outcome {
        run(&mut self.home.thaw(&[&["cp"], arguments].concat()))
    }

    /// The error of a copy that is refused.
    fn refused(&self, arguments: &[&str]) -> String {
        let outcome = self.copy(arguments);
        assert_eq!(outcome.code(), 125, "{arguments:?}: {outcome:?}");
        assert_eq!(outcome.stderr.lines().count(), 1, "{outcome:?}");
        outcome.stderr
    }

    fn shell(&self, script: &str) -> String {
        run(&mut self.home.thaw(&["exec", "box", "sh", "-c", script])).ok()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        run(&mut self.home.thaw(&["rm", "box"]));
        let _ = self.thawd.kill();
        let _ = self.thawd.wait();
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A directory with everything that a copy must keep.
fn tree(at: &Path) {
    fs::create_dir_all(at.join("sub/empty")).unwrap();
    fs::write(at.join("file"), "contents").unwrap();
    fs::set_permissions(at.join("file"), fs::Permissions::from_mode(0o4640)).unwrap();
    fs::hard_link(at.join("file"), at.join("sub/again")).unwrap();
    symlink("../../../../etc/passwd", at.join("sub/out")).unwrap();
    let odd = std::ffi::OsStr::from_bytes(b"odd\xffname");
    fs::write(at.join(odd), "odd").unwrap();
    let large: Vec<u8> = (0..3_000_000_u32).map(|n| (n / 7) as u8).collect();
    fs::write(at.join("large"), large).unwrap();
    let sparse = File::create(at.join("sparse")).unwrap();
    sparse.set_len(256 << 20).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&sparse, b"end", (256 << 20) - 3).unwrap();
}

#[test]
fn files_and_directories_are_copied_as_docker_copies_them() {
    let place = Place::new(&[]);
    let here = place.home.scratch("here");
    tree(&here.join("tree"));
    place.shell("mkdir /srv");
    // In: a directory into one that exists, into a new one, and what is in it.
    place.copy(&[text(&here.join("tree")), "box:/srv"]).ok();
    place.copy(&[text(&here.join("tree")), "box:/tmp/new"]).ok();
    place
        .copy(&[&format!("{}/.", text(&here.join("tree"))), "box:/srv"])
        .ok();
    let listed = place.shell(
        "cd /srv && stat -c '%a %h %s %u' file tree/file && readlink tree/sub/out && du -k tree/sparse /tmp/new/sparse \
         && ls -d /tmp/new/sub/empty sub/empty",
    );
    let lines: Vec<&str> = listed.lines().collect();
    assert_eq!(
        lines[..3],
        ["4640 2 8 0", "4640 2 8 0", "../../../../etc/passwd"],
        "{listed}"
    );
    for line in &lines[3..5] {
        let used: u64 = line.split('\t').next().unwrap().parse().unwrap();
        assert!(used < 1024, "holes stay holes: {listed}");
    }
    assert_eq!(lines[5..], ["/tmp/new/sub/empty", "sub/empty"]);
    // Out again: the same, except for set-user-ID.
    place.copy(&["box:/srv/tree", text(&here.join("back"))]).ok();
    for name in ["file", "sub/again", "large", "sparse"] {
        let (old, new) = (here.join("tree").join(name), here.join("back").join(name));
        assert!(fs::read(old).unwrap() == fs::read(new).unwrap(), "{name}");
    }
    let odd = std::ffi::OsStr::from_bytes(b"odd\xffname");
    assert_eq!(fs::read(here.join("back").join(odd)).unwrap(), b"odd");
    let file = fs::metadata(here.join("back/file")).unwrap();
    assert_eq!((file.mode() & 0o7777, file.nlink()), (0o640, 2));
    assert!(fs::metadata(here.join("back/sparse")).unwrap().blocks() * 512 < 1 << 20);
    assert_eq!(
        fs::read_link(here.join("back/sub/out")).unwrap(),
        Path::new("../../../../etc/passwd")
    );
    // Single files: under their own name, under another, through a link, and the link itself.
    place.copy(&["box:/etc/passwd", text(&here)]).ok();
    place.copy(&["box:/etc/passwd", text(&here.join("users"))]).ok();
    assert!(fs::read_to_string(here.join("users")).unwrap().contains("root"));
    assert!(here.join("passwd").exists());
    place.shell("ln -s /etc/passwd /tmp/link");
    place.copy(&["box:/tmp/link", text(&here.join("link"))]).ok();
    place
        .copy(&["-L", "box:/tmp/link", text(&here.join("followed"))])
        .ok();
    assert!(fs::symlink_metadata(here.join("link")).unwrap().is_symlink());
    assert!(fs::symlink_metadata(here.join("followed")).unwrap().is_file());
    place.shell("ln -s /tmp/target /tmp/through");
    place.copy(&[text(&here.join("users")), "box:/tmp/through"]).ok();
    assert_eq!(
        place.shell("test -L /tmp/through && grep -c root /tmp/target"),
        "1\n"
    );
    // Owners only on request.
    std::os::unix::fs::chown(here.join("users"), Some(1234), Some(5678)).unwrap();
    place
        .copy(&["-a", text(&here.join("users")), "box:/tmp/kept"])
        .ok();
    place.copy(&[text(&here.join("users")), "box:/tmp/roots"]).ok();
    assert_eq!(
        place.shell("stat -c %u:%g /tmp/kept /tmp/roots"),
        "1234:5678\n0:0\n"
    );
}

#[test]
fn tar_streams_go_in_and_out() {
    let place = Place::new(&[]);
    let here = place.home.scratch("here");
    place.shell("mkdir -p /data/sub && echo one >/data/sub/one");
    let out = File::create(here.join("out.tar")).unwrap();
    let written = place.home.thaw(&["cp", "box:/data", "-"]).stdout(out).status();
    assert!(written.unwrap().success());
    let mut archive = tar::Archive::new(File::open(here.join("out.tar")).unwrap());
    let mut names: Vec<_> = archive
        .entries()
        .unwrap()
        .map(|e| e.unwrap().path().unwrap().to_str().unwrap().to_owned())
        .collect();
    names.sort();
    assert_eq!(names, ["data/", "data/sub/", "data/sub/one"]);
    let mut command = place.home.thaw(&["cp", "-", "box:/tmp"]);
    let again = run(command.stdin(Stdio::from(File::open(here.join("out.tar")).unwrap())));
    again.ok();
    assert_eq!(place.shell("cat /tmp/data/sub/one"), "one\n");
    // The same over the API.
    let archive = fs::read(here.join("out.tar")).unwrap();
    place.shell("mkdir /api");
    let (head, body) = ask(&place.home, "PUT", "path=/api&archive=tar", &archive);
    assert!(head.starts_with("HTTP/1.1 204"), "{head} {body:?}");
    assert_eq!(place.shell("cat /api/data/sub/one"), "one\n");
    let (head, body) = ask(&place.home, "GET", "path=/api/data/.&archive=tar", b"");
    assert!(head.contains("application/x-tar"), "{head}");
    assert!(body.windows(9).any(|part| part == b"./sub/one"));
    let (head, _) = ask(&place.home, "GET", "path=/none&archive=tar", b"");
    assert!(head.starts_with("HTTP/1.1 404"), "{head}");
}

#[test]
fn api_lists_looks_at_makes_moves_and_removes_files() {
    let place = Place::new(&[]);
    let json = |request: &str, body: &str| {
        let (head, body) = ask_at(&place.home, request, body.as_bytes());
        let body: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
        (head[9..12].parse::<u16>().unwrap(), body)
    };
    let made = json(
        "POST /files/mkdir",
        r#"{"path": "/w/a/b", "mode": "2770", "parents": true}"#,
    );
    assert_eq!(made.0, 204, "{}", made.1);
    place.shell("cd /w && echo one >1 && ln -s 1 link && mkfifo fifo && stat -c %a a/b | grep 2770");
    let (status, list) = json("GET /files/list?path=/w&limit=3", "");
    let names = |list: &serde_json::Value| {
        let items = list["items"].as_array().unwrap();
        items
            .iter()
            .map(|i| format!("{}:{}", i["name"].as_str().unwrap(), i["kind"].as_str().unwrap()))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        (status, names(&list)),
        (
            200,
            vec!["1:file".into(), "a:directory".into(), "fifo:fifo".into()]
        )
    );
    let token = list["continue_token"].as_str().unwrap();
    let (_, rest) = json(&format!("GET /files/list?path=/w&limit=3&continue={token}"), "");
    assert_eq!(
        (names(&rest), &rest["continue_token"]),
        (vec!["link:link".into()], &serde_json::Value::Null)
    );
    let (_, link) = json("GET /files/stat?path=/w/link", "");
    assert_eq!((&link["kind"], &link["target"]), (&"link".into(), &"1".into()));
    let (_, file) = json("GET /files/stat?path=/w/link&follow=true", "");
    assert_eq!((&file["kind"], &file["size"]), (&"file".into(), &4.into()));
    let taken = json("POST /files/move", r#"{"from": "/w/1", "to": "/w/a"}"#);
    assert_eq!((taken.0, &taken.1["code"]), (409, &"file-refused".into()));
    assert_eq!(
        json("POST /files/move", r#"{"from": "/w/1", "to": "/w/a/1"}"#).0,
        204
    );
    assert_eq!(json("DELETE /files?path=/w", "").0, 409);
    assert_eq!(json("DELETE /files?path=/w&recursive=true", "").0, 204);
    assert_eq!(json("DELETE /files?path=/w", "").0, 404);
    assert_eq!(
        place.shell("ls -d /w 2>&1; true").trim(),
        "ls: /w: No such file or directory"
    );
}

#[test]
fn api_watches_a_directory_until_it_is_removed() {
    let place = Place::new(&[]);
    place.shell("mkdir -p /w/sub && ln -s /w /link");
    let mut all = Watch::open(&place.home, "path=/link&recursive=true")
        .ok()
        .unwrap();
    let mut top = Watch::open(&place.home, "path=/w").ok().unwrap();
    place.shell("cd /w && echo 1 >f && chmod 600 f && mv f sub/g && rm sub/g");
    all.expect(&[
        "CREATE f",
        "WRITE f",
        "CHMOD f",
        "RENAME f",
        "CREATE sub/g",
        "REMOVE sub/g",
    ]);
    top.expect(&["CREATE f", "WRITE f", "CHMOD f", "RENAME f"]);
    // Files in new directories are told, however fast they follow and under whatever name.
    place.shell("cd /w && mkdir -p new/deep && : >new/deep/h && mv new sub/moved && : >sub/moved/deep/i");
    top.expect(&["CREATE new", "RENAME new"]);
    let mut told = Vec::new();
    let is_there = |told: &[String], end: &str| told.iter().any(|event| event.ends_with(end));
    while !is_there(&told, "deep/h") || !is_there(&told, "CREATE sub/moved/deep/i") {
        told.push(all.next().unwrap());
    }
    assert!(
        is_there(&told, "CREATE new") && is_there(&told, "CREATE sub/moved"),
        "{told:?}"
    );
    // A file that the API writes appears whole.
    let (head, _) = ask(&place.home, "PUT", "path=/w/up", b"x");
    assert!(head.starts_with("HTTP/1.1 204"), "{head}");
    all.expect(&["CREATE up"]);
    top.expect(&["CREATE up"]);
    place.shell("rm -r /w/sub /w/up && rmdir /w");
    let end = "END the directory was removed";
    for watch in [&mut all, &mut top] {
        let rest: Vec<String> = std::iter::from_fn(|| watch.next()).collect();
        assert!(
            rest.ends_with(&["REMOVE up".into(), "REMOVE .".into(), end.into()]),
            "{rest:?}"
        );
    }
}

#[test]
fn watches_end_with_their_callers_and_with_the_container() {
    let place = Place::new(&[]);
    for (query, status) in [
        ("path=/none", 404),
        ("path=/etc/..", 400),
        ("path=/etc/passwd", 404),
    ] {
        assert_eq!(Watch::open(&place.home, query).err(), Some(status), "{query}");
    }
    let mut open: Vec<Watch> = (0..16)
        .map(|_| Watch::open(&place.home, "path=/tmp").ok().unwrap())
        .collect();
    assert_eq!(Watch::open(&place.home, "path=/tmp").err(), Some(409));
    open.pop();
    let began = Instant::now();
    while let Err(status) = Watch::open(&place.home, "path=/tmp").map(drop) {
        assert_eq!(status, 409);
        assert!(
            began.elapsed() < Duration::from_secs(60),
            "the watch of a caller that left stays"
        );
    }
    let (head, _) = ask_at(&place.home, "POST /signal", br#"{"signal": 9}"#);
    assert!(head.starts_with("HTTP/1.1 204"), "{head}");
    for mut watch in open {
        let rest: Vec<String> = std::iter::from_fn(|| watch.next()).collect();
        // The sandbox may be gone before the guest says so.
        let last = rest.last().unwrap();
        assert!(
            last == "END the container has ended" || last.starts_with("ERROR"),
            "{rest:?}"
        );
    }
}

#[test]
fn kept_process_outlives_its_caller_and_thawd() {
    let mut place = Place::new(&[]);
    let command =
        r#"{"command": ["sh", "-c", "echo out; echo err >&2; read x; echo got $x; exit 7"], "keep": true}"#;
    let (head, made) = ask_at(&place.home, "POST /exec", command.as_bytes());
    assert!(head.starts_with("HTTP/1.1 201"), "{head}");
    let made: serde_json::Value = serde_json::from_slice(&made).unwrap();
    let id = made["id"].as_str().unwrap().to_owned();
    place.thawd.kill().unwrap();
    place.thawd.wait().unwrap();
    place.thawd = place.home.thawd(&[]);
    let (_, list) = ask_at(&place.home, "GET /processes", b"");
    let list: serde_json::Value = serde_json::from_slice(&list).unwrap();
    let there = &list["items"][0];
    assert_eq!(
        (&there["id"], &there["keep"], &there["exit_code"]),
        (&made["id"], &true.into(), &serde_json::Value::Null)
    );
    assert!(there["pid"].as_i64().unwrap() > 1, "{list}");
    let input = format!(r#"{{"process": "{id}", "data": "it\n", "eof": true}}"#);
    let (head, _) = ask_at(&place.home, "POST /processes/input", input.as_bytes());
    assert!(head.starts_with("HTTP/1.1 204"), "{head}");
    let output = |offset: u64| {
        let request = format!("GET /processes/output?process={id}&offset={offset}");
        String::from_utf8(ask_at(&place.home, &request, b"").1).unwrap()
    };
    let whole = output(0);
    for part in ["out\\n", "err\\n", "got it\\n", r#"{"exit_code":7}"#] {
        assert!(whole.contains(part), "{whole}");
    }
    assert!(output(8).contains("got it") && !output(8).contains("err"));
    // Within a piece, at the end, and beyond it.
    let inner = output(10);
    let piece = r#"{"data":"t it\n","encoding":"utf-8","offset":10}"#;
    assert!(inner.contains(piece), "{inner}");
    let (end, beyond) = (output(15), output(16));
    assert!(end.contains("EXIT") && !end.contains("data"), "{end}");
    assert!(beyond.contains("ERROR") && !beyond.contains("EXIT"), "{beyond}");
    let signal = format!(r#"{{"process": "{id}", "signal": 9}}"#);
    let (head, _) = ask_at(&place.home, "POST /processes/signal", signal.as_bytes());
    assert!(head.starts_with("HTTP/1.1 409"), "it has ended: {head}");
}

#[test]
fn copies_that_cannot_be_say_why() {
    let place = Place::new(&["--disk", "64m"]);
    let here = place.home.scratch("here");
    fs::write(here.join("f"), "f").unwrap();
    fs::create_dir(here.join("d")).unwrap();
    let (file, directory) = (here.join("f"), here.join("d"));
    let (file, directory) = (text(&file), text(&directory));
    place.shell("mkdir /x && mknod /x/dev c 1 3 && echo >/plain && ln -s / /x/up && mkfifo /fifo");
    for (arguments, part) in [
        (&[directory, "box:/plain"][..], "onto the file"),
        (&["box:/x", file], "onto the file"),
        (&["box:/x", directory], "dev is a device"),
        (&["box:/none", directory], "no /none"),
        (&[file, "box:/none/f"], "/none"),
        (&[file, "box:/none/"], "no directory"),
        (&[&format!("{file}/"), "box:/tmp"], "Not a directory"),
        (&["box:/plain/", directory], "is not a directory"),
        (&["box:/proc/version", directory], "kernel"),
        (&["box:/a", "box:/b"], "directly"),
        (&[file, directory], "neither"),
        (&["-", "box:/plain"], "not a directory"),
        (&[text(&here.join("none")), "box:/tmp"], "none"),
    ] {
        let error = place.refused(arguments);
        assert!(error.contains(part), "{arguments:?}: {error}");
    }
    let nowhere = place.copy(&["nobody:/x", directory]);
    assert_eq!(nowhere.code(), 91, "{nowhere:?}");
    // A guest's symbolic link where a host file should go is refused, and nothing outside the destination is written.
    fs::create_dir(here.join("e")).unwrap();
    symlink("..", here.join("e/x")).unwrap();
    let error = place.refused(&["box:/x", text(&here.join("e"))]);
    assert!(error.contains("x is a file or a link"), "{error}");
    // More than there is room for: what is complete stays, the rest is told.
    let large = File::create(here.join("large")).unwrap();
    let mut large = std::io::BufWriter::new(large);
    for n in 0..(100 << 18) {
        large.write_all(&(n as u32 | 1).to_le_bytes()).unwrap();
    }
    drop(large);
    let error = place.refused(&[text(&here.join("large")), "box:/large"]);
    assert!(error.contains("No space left"), "{error}");
    assert_eq!(place.shell("ls / | grep -c large; true"), "0\n");
    place.copy(&["box:/fifo", text(&here.join("fifo"))]).ok();
    // Devices of the host become nodes of the guest, with nothing behind them that is the host's; sockets are left out.
    let _socket = std::os::unix::net::UnixListener::bind(here.join("d/socket")).unwrap();
    place.copy(&["/dev/null", "box:/null"]).ok();
    place.copy(&[directory, "box:/sockets"]).ok();
    assert_eq!(place.shell("stat -c %t:%T /null; ls /sockets"), "1:3\nx\n");
}

/// A request for files of the sandbox: the answer's head and body.
fn ask(home: &Home, method: &str, query: &str, body: &[u8]) -> (String, Vec<u8>) {
    ask_at(home, &format!("{method} /files?{query}"), body)
}

/// The same of a method and a path below the sandbox's.
fn ask_at(home: &Home, request: &str, body: &[u8]) -> (String, Vec<u8>) {
    let mut stream = send(home, request, body);
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let at = answer.windows(4).position(|part| part == b"\r\n\r\n").unwrap();
    let head = String::from_utf8(answer[..at].to_vec()).unwrap();
    (head, answer[at + 4..].to_vec())
}

/// Sends a request, and returns the connection with its answer.
fn send(home: &Home, request: &str, body: &[u8]) -> UnixStream {
    let (method, path) = request.split_once(' ').unwrap();
    let mut stream = UnixStream::connect(home.run().join("thawd.sock")).unwrap();
    let length = body.len();
    let head = format!(
        "{method} /v1/sandboxes/box{path} HTTP/1.1\r\nHost: thawd\r\nConnection: close\r\n\
         Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(body).unwrap();
    stream
}

/// A watch of a directory.
struct Watch(BufReader<UnixStream>);

impl Watch {
    /// Returns when the watch has begun, or the status of the refusal.
    fn open(home: &Home, query: &str) -> Result<Watch, u16> {
        let stream = send(home, &format!("GET /files/watch?{query}"), b"");
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut watch = Watch(BufReader::new(stream));
        let status = watch.line()[9..12].parse().unwrap();
        while !watch.line().trim().is_empty() {}
        match status {
            200 => Ok(watch),
            status => Err(status),
        }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        line
    }

    /// The next event, as `TYPE name`; `None` at the end. Sizes of chunks and KEEPALIVE are skipped.
    fn next(&mut self) -> Option<String> {
        loop {
            let line = self.line();
            if line.is_empty() {
                return None;
            }
            if let Ok(event @ serde_json::Value::Object(_)) = serde_json::from_str(&line) {
                let object = &event["object"];
                let rest = object["name"].as_str().or(object["reason"].as_str());
                let kind = event["type"].as_str().unwrap();
                if kind == "KEEPALIVE" {
                    continue;
                }
                return Some(format!("{kind} {}", rest.unwrap_or_default()));
            }
        }
    }

    fn expect(&mut self, events: &[&str]) {
        for expected in events {
            assert_eq!(self.next().as_deref(), Some(*expected), "{events:?}");
        }
    }
}
