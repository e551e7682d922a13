//! What containerd must be told: that there is a runtime of this name, and a snapshotter.
//!
//! The lines go into containerd's own file, not into one it imports: containerd 1.x takes a whole plugin's settings from
//! the last file that says anything of it, so a file of ours would undo the owner's. They are read by containerd before
//! they are put in place, where it is installed.

use std::fmt::Write as _;
use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use thaw_sandbox::error::{Error, ErrorKind};
use toml::{Table, Value};

use super::block;

/// The runtime's and the snapshotter's name: what a RuntimeClass says as its handler.
pub const NAME: &str = "thaw";
/// What `ctr run --runtime` takes.
pub const RUNTIME: &str = "io.containerd.thaw.v2";
const ANNOTATIONS_OFF: &str = "disable_snapshot_annotations";
const SHIM: &str = "containerd-shim-thaw-v2";
/// Where containerd looks for shims wherever it was started.
const WELL_KNOWN: [&str; 4] = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin"];
/// Remembered: there was no file, and no directory for it.
const MADE_FILE: &str = "made-file";
const MADE_DIRECTORY: &str = "made-directory";

/// What a block is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// Where thawd serves as a snapshotter.
    pub snapshots: PathBuf,
    /// Where the bytes of its images are: kubelets look how full that file system is, and evict no pod while they cannot.
    pub images: PathBuf,
    /// The shim, where containerd would not find it by its name.
    pub shim: Option<PathBuf>,
}

/// Lines for containerd's file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    pub lines: String,
    /// Pods' images are pulled lazily, by thawd. Else by containerd, whole.
    pub lazy: bool,
}

impl Setting {
    /// For a shim that is beside this program, or where containerd finds it.
    pub fn find(snapshots: PathBuf, images: PathBuf, program: &Path) -> Result<Setting, Error> {
        let known = WELL_KNOWN.iter().map(|directory| Path::new(directory).join(SHIM));
        if known.into_iter().any(|path| path.is_file()) {
            return Ok(Setting {
                snapshots,
                images,
                shim: None,
            });
        }
        let beside = program.with_file_name(SHIM);
        if !beside.is_file() {
            let what = format!("{SHIM} is neither in {} nor beside thaw", WELL_KNOWN.join(", "));
            return Err(Error::new(ErrorKind::ProgramMissing, what).remedy("install it: make install"));
        }
        Ok(Setting {
            snapshots,
            images,
            shim: Some(beside),
        })
    }

    /// The block for a file that says `owners`.
    ///
    /// # Errors
    /// Of a version that has no runtimes, or what stands there leaves no room for another.
    pub fn block(&self, owners: &str) -> Result<Block, String> {
        let table: Table = owners
            .parse()
            .map_err(|e: toml::de::Error| e.message().to_owned())?;
        let names = Names::of(&table)?;
        let mut blocks = vec![self.lines(&names, &table, "", false)];
        match at(&table, names.annotated).and_then(|of| of.get(ANNOTATIONS_OFF)?.as_bool()) {
            Some(true) => {}
            Some(false) => blocks.insert(0, self.lines(&names, &table, "", true)),
            None => {
                let header: Vec<String> = names.annotated.iter().map(|name| key(name)).collect();
                let on = format!("[{}]\n{ANNOTATIONS_OFF} = false\n\n", header.join("."));
                blocks.insert(0, self.lines(&names, &table, &on, true));
            }
        }
        let mut why = String::new();
        for block in blocks {
            // A table can be written once: where the owner has, nothing can be added to it at the end.
            match format!("{owners}\n{}", block.lines).parse::<Table>() {
                Ok(_) => return Ok(block),
                Err(e) => why = e.message().to_owned(),
            }
        }
        Err(why)
    }

    /// What is said of the runtime and of the snapshotter. `annotations`: lines that turn them on.
    fn lines(&self, names: &Names, owners: &Table, annotations: &str, lazy: bool) -> Block {
        let mut lines = String::new();
        if owners.is_empty() {
            lines.push_str("version = 2\n\n");
        }
        lines.push_str(annotations);
        let runtimes = at(owners, &names.runtimes()).and_then(Value::as_table);
        let header = format!("plugins.{}.containerd.runtimes", key(names.cri));
        // Before containerd 2, one runtime that is named replaces the one there is by default.
        if names.version == 2 && runtimes.is_none_or(Table::is_empty) {
            let _ = writeln!(
                lines,
                "[{header}.runc]\nruntime_type = \"io.containerd.runc.v2\"\n"
            );
        }
        let _ = writeln!(lines, "[{header}.{NAME}]\nruntime_type = \"{RUNTIME}\"");
        if let Some(shim) = &self.shim {
            let _ = writeln!(lines, "runtime_path = {}", quoted(&shim.to_string_lossy()));
        }
        if lazy {
            let _ = writeln!(lines, "snapshotter = \"{NAME}\"");
        }
        let _ = writeln!(
            lines,
            "privileged_without_host_devices = true\n\
             pod_annotations = [\"io.katacontainers.*\", \"run.thaw.*\"]\n\
             container_annotations = [\"io.katacontainers.*\", \"run.thaw.*\"]\n\n\
             [proxy_plugins.{NAME}]\ntype = \"snapshot\"\naddress = {}\n\n\
             [proxy_plugins.{NAME}.exports]\nroot = {}",
            quoted(&self.snapshots.to_string_lossy()),
            quoted(&self.images.to_string_lossy())
        );
        // containerd 2 knows the roots of the default snapshotter and of those that are named here, not of a runtime's.
        if lazy && names.version > 2 {
            let images: Vec<String> = names.annotated.iter().map(|name| key(name)).collect();
            let _ = writeln!(
                lines,
                "\n[{}.runtime_platforms.{NAME}]\nsnapshotter = \"{NAME}\"",
                images.join(".")
            );
        }
        Block { lines, lazy }
    }
}

/// What a version of the file calls things.
struct Names {
    version: i64,
    /// The plugin that has runtimes.
    cri: &'static str,
    /// The table that says whether snapshotters are told which image they are asked for.
    annotated: &'static [&'static str],
}

impl Names {
    fn of(table: &Table) -> Result<Names, String> {
        let version = match table.get("version") {
            None if table.is_empty() => 2,
            None => 1,
            Some(version) => version.as_integer().ok_or("its version is no number")?,
        };
        let names = match version {
            2 => Names {
                version,
                cri: "io.containerd.grpc.v1.cri",
                annotated: &["plugins", "io.containerd.grpc.v1.cri", "containerd"],
            },
            3.. => Names {
                version,
                cri: "io.containerd.cri.v1.runtime",
                annotated: &["plugins", "io.containerd.cri.v1.images"],
            },
            _ => {
                return Err(format!(
                    "it is of version {version}: `containerd config migrate` writes it anew"
                ));
            }
        };
        let ours = at(table, &names.runtimes()).and_then(|runtimes| runtimes.get(NAME));
        match ours {
            Some(_) => Err(format!("it has a runtime {NAME} already, not of `thaw install`")),
            None => Ok(names),
        }
    }

    fn runtimes(&self) -> [&'static str; 4] {
        ["plugins", self.cri, "containerd", "runtimes"]
    }
}

/// What a table has at a path.
fn at<'a>(table: &'a Table, path: &[&str]) -> Option<&'a Value> {
    let (first, rest) = path.split_first()?;
    rest.iter()
        .try_fold(table.get(*first)?, |value, name| value.get(*name))
}

/// A name as a part of a header.
fn key(name: &str) -> String {
    match name.contains('.') {
        true => quoted(name),
        false => name.to_owned(),
    }
}

/// A text as a TOML string.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// containerd's file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigFile {
    /// As it was named.
    named: PathBuf,
    /// The file itself, where that is a link.
    path: PathBuf,
    text: Option<String>,
}

impl ConfigFile {
    pub fn read(named: &Path) -> Result<ConfigFile, Error> {
        let path = fs::canonicalize(named).unwrap_or_else(|_| named.to_owned());
        let text = match fs::read_to_string(&path) {
            Ok(text) => Some(text),
            Err(e) if e.kind() == io::ErrorKind::NotFound => None,
            Err(e) => return Err(Error::system(format!("cannot read {}", named.display()), &e)),
        };
        Ok(ConfigFile {
            named: named.to_owned(),
            path,
            text,
        })
    }

    fn text(&self) -> &str {
        self.text.as_deref().unwrap_or_default()
    }

    fn unusable(&self, why: impl std::fmt::Display) -> Error {
        Error::new(
            ErrorKind::ConfigInvalid,
            format!("{} cannot be changed: {why}", self.named.display()),
        )
        .remedy("correct it, or add what `thaw install --print` shows by hand")
    }

    /// Whether the block there remembers a word.
    pub fn remembers(&self, word: &str) -> bool {
        let divided = block::divide(self.text());
        divided.is_ok_and(|d| d.block.is_some_and(|b| block::remembers(b, word)))
    }

    /// Whether a block is there.
    pub fn has_block(&self) -> bool {
        block::divide(self.text()).is_ok_and(|d| d.block.is_some())
    }

    /// The block for this file.
    pub fn block(&self, setting: &Setting) -> Result<Block, Error> {
        let owners = block::without(self.text()).map_err(|e| self.unusable(e))?;
        setting.block(&owners).map_err(|why| self.unusable(why))
    }

    /// Has the block in the file; whether that changed it. `remembered` besides what this remembers itself.
    pub fn install(&self, block: &Block, remembered: &[&str]) -> Result<bool, Error> {
        let directory = self.path.parent().unwrap_or(Path::new("/"));
        let mut words = remembered.to_vec();
        if self.text.is_none() || self.remembers(MADE_FILE) {
            words.push(MADE_FILE);
        }
        if !directory.exists() || self.remembers(MADE_DIRECTORY) {
            words.push(MADE_DIRECTORY);
        }
        let text = block::with(self.text(), &block.lines, &words).map_err(|e| self.unusable(e))?;
        if self.text.as_deref() == Some(&text) {
            return Ok(false);
        }
        fs::create_dir_all(directory)
            .map_err(|e| Error::system(format!("cannot make {}", directory.display()), &e))?;
        self.replace(&text, true)?;
        Ok(true)
    }

    /// Takes the block away; whether one was there.
    pub fn uninstall(&self) -> Result<bool, Error> {
        let (made_file, made_directory) = (self.remembers(MADE_FILE), self.remembers(MADE_DIRECTORY));
        let owners = block::without(self.text()).map_err(|e| self.unusable(e))?;
        if self.text.as_deref().unwrap_or_default() == owners {
            return Ok(false);
        }
        if !made_file || !owners.is_empty() {
            self.replace(&owners, false)?;
            return Ok(true);
        }
        fs::remove_file(&self.path)
            .map_err(|e| Error::system(format!("cannot remove {}", self.named.display()), &e))?;
        if let (true, Some(directory)) = (made_directory, self.path.parent()) {
            // Not ours any more, if somebody has put something into it.
            let _ = fs::remove_dir(directory);
        }
        Ok(true)
    }

    /// Puts another text in its place, whole, with the owner and the mode there were.
    fn replace(&self, text: &str, checked: bool) -> Result<(), Error> {
        let failed = |e: &io::Error| Error::system(format!("cannot write {}", self.named.display()), e);
        let directory = self.path.parent().unwrap_or(Path::new("/"));
        let mut file = tempfile::Builder::new()
            .prefix(".config.toml.thaw-")
            .tempfile_in(directory)
            .map_err(|e| failed(&e))?;
        self.fill(file.as_file_mut(), text).map_err(|e| failed(&e))?;
        if checked {
            accepted_by_containerd(file.path()).map_err(|why| self.unusable(why))?;
        }
        file.persist(&self.path).map_err(|e| failed(&e.error))?;
        Ok(())
    }

    /// Writes a file that is to take its place.
    fn fill(&self, file: &mut fs::File, text: &str) -> io::Result<()> {
        file.write_all(text.as_bytes())?;
        let mode = match fs::metadata(&self.path) {
            Ok(old) => {
                std::os::unix::fs::fchown(&*file, Some(old.uid()), Some(old.gid()))?;
                old.mode()
            }
            Err(_) => 0o644,
        };
        file.set_permissions(fs::Permissions::from_mode(mode & 0o7777))?;
        file.sync_all()
    }
}

/// Has containerd read a file, where there is a containerd.
fn accepted_by_containerd(path: &Path) -> Result<(), String> {
    let read = Command::new("containerd")
        .arg("--config")
        .arg(path)
        .args(["config", "dump"])
        .stdin(Stdio::null())
        .output();
    match read {
        Ok(output) if !output.status.success() => {
            let said = String::from_utf8_lossy(&output.stderr);
            let last = said.lines().rfind(|line| !line.trim().is_empty());
            Err(format!(
                "containerd would not take it: {}",
                last.unwrap_or("it does not say why")
            ))
        }
        // It may run in another place than this.
        Ok(_) | Err(_) => Ok(()),
    }
}

#[cfg(test)]
#[path = "containerd_test.rs"]
mod tests;
