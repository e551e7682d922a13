//! containerd's configuration: the runtime and the snapshotter.
//!
//! The lines go into containerd's own file, not into an imported one: containerd 1.x takes all settings of a plugin from the last file
//! that mentions it, so an imported file would undo the owner's settings. If containerd is installed, it parses the new file before that
//! replaces the old one.

use std::fmt::Write as _;
use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use thaw_sandbox::error::{Error, ErrorKind};
use toml::{Table, Value};

use super::block;

/// The name of the runtime and of the snapshotter, which is a RuntimeClass's handler.
pub const NAME: &str = "thaw";
/// The runtime's type, for `ctr run --runtime`.
pub const RUNTIME: &str = "io.containerd.thaw.v2";
const ANNOTATIONS_OFF: &str = "disable_snapshot_annotations";
const SHIM: &str = "containerd-shim-thaw-v2";
/// The directory in which containerd always looks for shims.
const WELL_KNOWN: [&str; 4] = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin"];
/// Remembered: the file and its directory did not exist.
const MADE_FILE: &str = "made-file";
const MADE_DIRECTORY: &str = "made-directory";

/// The values in a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// The socket of thawd's snapshotter.
    pub snapshots: PathBuf,
    /// The directory of its images. A kubelet watches how full that file system is, and cannot evict pods without it.
    pub images: PathBuf,
    /// The shim's path, if containerd would not find it by name.
    pub shim: Option<PathBuf>,
}

/// The lines for containerd's file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    pub lines: String,
    /// Whether thawd pulls pods' images, lazily. Otherwise containerd pulls them completely.
    pub lazy: bool,
}

impl Setting {
    /// For a shim beside this program, or one that containerd finds.
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

    /// The block for a file whose other lines are `owners`.
    ///
    /// # Errors
    /// The file's version has no runtimes, or its lines conflict with the block.
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
            // TOML defines a table once: if the owner has it, nothing can be added at the end.
            match format!("{owners}\n{}", block.lines).parse::<Table>() {
                Ok(_) => return Ok(block),
                Err(e) => why = e.message().to_owned(),
            }
        }
        Err(why)
    }

    /// The tables of the runtime and of the snapshotter. `annotations` are lines that enable annotations.
    fn lines(&self, names: &Names, owners: &Table, annotations: &str, lazy: bool) -> Block {
        let mut lines = String::new();
        if owners.is_empty() {
            lines.push_str("version = 2\n\n");
        }
        lines.push_str(annotations);
        let runtimes = at(owners, &names.runtimes()).and_then(Value::as_table);
        let header = format!("plugins.{}.containerd.runtimes", key(names.cri));
        // Before containerd 2, a configured runtime replaces the default one.
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
             pod_annotations = [\"io.katacontainers.*\", \"run.thaw.*\", \"thaw.run/*\"]\n\
             container_annotations = [\"io.katacontainers.*\", \"run.thaw.*\"]\n\n\
             [proxy_plugins.{NAME}]\ntype = \"snapshot\"\naddress = {}\n\n\
             [proxy_plugins.{NAME}.exports]\nroot = {}",
            quoted(&self.snapshots.to_string_lossy()),
            quoted(&self.images.to_string_lossy())
        );
        // containerd 2 knows the roots of the default snapshotter and of those listed here, but not the root of a runtime's snapshotter.
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

/// The names in a version of the file.
struct Names {
    version: i64,
    /// The plugin that has runtimes.
    cri: &'static str,
    /// The table with the setting that passes image names to snapshotters.
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

/// The value of a table at a path.
fn at<'a>(table: &'a Table, path: &[&str]) -> Option<&'a Value> {
    let (first, rest) = path.split_first()?;
    rest.iter()
        .try_fold(table.get(*first)?, |value, name| value.get(*name))
}

/// A name within a table header.
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
    /// The path that was given.
    named: PathBuf,
    /// The file itself, if the path is a link.
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

    /// Whether the file has a block.
    pub fn has_block(&self) -> bool {
        block::divide(self.text()).is_ok_and(|d| d.block.is_some())
    }

    /// The block for this file.
    pub fn block(&self, setting: &Setting) -> Result<Block, Error> {
        let owners = block::without(self.text()).map_err(|e| self.unusable(e))?;
        setting.block(&owners).map_err(|why| self.unusable(why))
    }

    /// Writes the block into the file, with `remembered` and its own remembered words. Returns whether the file changed.
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

    /// Removes the block, and returns whether there was one.
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
            // The directory stays if it contains anything.
            let _ = fs::remove_dir(directory);
        }
        Ok(true)
    }

    /// Replaces the file atomically, and keeps its owner and mode.
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

    /// Writes the new file under another name.
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

/// Lets containerd parse a file, if containerd is installed.
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
        // containerd may run elsewhere.
        Ok(_) | Err(_) => Ok(()),
    }
}

#[cfg(test)]
#[path = "containerd_test.rs"]
mod tests;
