//! A node of a test's own: images, templates and sandboxes apart from everything else on the machine.

use std::fs;
use std::io::BufRead;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::{Signal, kill_process};

use crate::{binary, pid_of, run, thaw};

/// Its directories, removed when dropped.
pub struct Home {
    directory: tempfile::TempDir,
}

impl Home {
    /// An empty one, with a template, on a filesystem that can reflink where there is one.
    pub fn new() -> Home {
        let place = std::env::var_os("THAW_DATA").map(PathBuf::from);
        let place = place.and_then(|data| Some(data.parent()?.to_path_buf()));
        let place = place.filter(|p| p.is_dir()).unwrap_or_else(std::env::temp_dir);
        let home = Home {
            directory: tempfile::tempdir_in(place).unwrap(),
        };
        fs::DirBuilder::new().mode(0o700).create(home.run()).unwrap();
        run(&mut home.thaw(&["-q", "template", "build"])).ok();
        home
    }

    /// THAW_DATA.
    pub fn data(&self) -> PathBuf {
        self.directory.path().join("data")
    }

    /// THAW_RUN. Nothing else is there.
    pub fn run(&self) -> PathBuf {
        self.directory.path().join("run")
    }

    /// A place for the test's own files.
    pub fn scratch(&self, name: &str) -> PathBuf {
        let path = self.directory.path().join(name);
        fs::create_dir_all(&path).unwrap();
        path
    }

    /// `thaw` here.
    pub fn thaw(&self, args: &[&str]) -> Command {
        let mut command = thaw(args);
        command.env("THAW_DATA", self.data()).env("THAW_RUN", self.run());
        command
    }

    /// `thawd` here, listening.
    pub fn thawd(&self, arguments: &[&str]) -> Child {
        self.thawd_with(arguments, &[])
    }

    /// The same with this in its environment.
    pub fn thawd_with(&self, arguments: &[&str], environment: &[(&str, &std::ffi::OsStr)]) -> Child {
        let mut command = Command::new(binary("thawd"));
        command.envs(environment.iter().copied());
        self.thawd_by(&mut command, arguments)
    }

    /// The same by this command: another release's.
    pub fn thawd_by(&self, command: &mut Command, arguments: &[&str]) -> Child {
        let mut child = command
            .arg("--json")
            .args(arguments)
            .env("THAW_DATA", self.data())
            .env("THAW_RUN", self.run())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = std::io::BufReader::new(child.stderr.take().unwrap()).lines();
        let listening = lines
            .by_ref()
            .find(|l| l.as_ref().is_ok_and(|l| l.contains("listening")));
        assert!(listening.is_some(), "thawd ended before it listened");
        // Drained, so that it never waits for us; shown, should the test fail.
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                eprintln!("thawd: {line}");
                // A panic here would fail no test.
                if line.contains(crate::FORBIDDEN_CALL) {
                    std::process::exit(101);
                }
            }
        });
        child
    }

    /// The store of images: removed, it is as on a new node.
    pub fn images(&self) -> PathBuf {
        self.data().join("images")
    }

    /// Makes the node forget all images. Nothing may run.
    pub fn forget_images(&self) {
        match fs::remove_dir_all(self.images()) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => panic!("{}: {e}", self.images().display()),
            _ => {}
        }
    }

    /// The store's files with this name, largest first: `data` of each layer, or `ready`.
    pub fn stored(&self, name: &str) -> Vec<PathBuf> {
        let mut found = Vec::new();
        collect(&self.images().join("layers"), name, &mut found);
        found.sort_by_key(|path| std::cmp::Reverse(fs::metadata(path).unwrap().len()));
        found
    }
}

impl Default for Home {
    fn default() -> Self {
        Home::new()
    }
}

fn collect(directory: &Path, name: &str, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            collect(&path, name, found);
        } else if path.file_name().is_some_and(|n| n == name) {
            found.push(path);
        }
    }
}

/// Runs a test without thawd, then with it.
pub fn with_and_without_thawd(test: impl Fn(&Home)) {
    let home = Home::new();
    test(&home);
    beside_thawd(&home, test);
}

/// Runs a test with thawd.
pub fn with_thawd(test: impl Fn(&Home)) {
    beside_thawd(&Home::new(), test);
}

fn beside_thawd(home: &Home, test: impl Fn(&Home)) {
    let thawd = home.thawd(&[]);
    test(home);
    stop(thawd);
}

/// Ends a thawd as an operator does.
pub fn stop(mut thawd: Child) {
    kill_process(pid_of(thawd.id() as i32), Signal::TERM).unwrap();
    assert!(thawd.wait().unwrap().success());
}
