//! Installs Thaw as a runtime of this host's containerd, and uninstalls it.
//!
//! Invariant: `uninstall` reverts what `install` changed, and nothing else; a repetition of either changes nothing. What the host cannot
//! show later (whether thawd was enabled before, whether the file existed) is remembered in the block in containerd's file, so that there is
//! no separate state that could become stale.

pub mod block;
pub mod containerd;
pub mod systemd;

use std::path::PathBuf;

use serde::Serialize;
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sandbox::paths::Paths;
use thaw_sandbox::state::RunDirectory;

use self::containerd::{Block, ConfigFile, Setting};

const THAWD: &str = "thawd.service";
const CONTAINERD: &str = "containerd.service";
/// Remembered: thawd was neither enabled nor running before.
const ENABLED: &str = "enabled-thawd";

/// containerd's configuration file, and whether to restart containerd.
#[derive(Clone, Debug)]
pub struct Options {
    pub config: PathBuf,
    pub restart: bool,
}

/// What an installation changed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Done {
    /// containerd's file was changed.
    pub configured: bool,
    /// Pods' images are pulled lazily.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lazy: Option<bool>,
    /// thawd was enabled or disabled.
    pub service: bool,
    /// containerd was restarted.
    pub restarted: bool,
    /// What the user still has to do.
    pub left: Vec<String>,
}

/// What `install` would write.
pub fn block(options: &Options, paths: &Paths) -> Result<Block, Error> {
    ConfigFile::read(&options.config)?.block(&setting(paths)?)
}

fn setting(paths: &Paths) -> Result<Setting, Error> {
    let program =
        std::env::current_exe().map_err(|e| Error::system("cannot tell where this program is", &e))?;
    Setting::find(paths.snapshots_socket(), paths.images(), &program)
}

/// Makes Thaw a runtime of containerd, and starts thawd.
pub fn install(options: &Options, paths: &Paths) -> Result<Done, Error> {
    let setting = setting(paths)?;
    let file = ConfigFile::read(&options.config)?;
    let block = file.block(&setting)?;
    let mut done = Done {
        lazy: Some(block.lazy),
        ..Done::default()
    };
    let manages = systemd::runs() && systemd::has(THAWD);
    let enables = manages && !(systemd::is("enabled", THAWD) && systemd::is("active", THAWD));
    let remembers = (enables && !systemd::is("enabled", THAWD)) || file.remembers(ENABLED);
    // First thawd: as soon as containerd knows the runtime, it may create pods.
    if enables {
        systemd::control(&["enable", "--now", THAWD])?;
        done.service = true;
    }
    if !manages {
        done.left
            .push("start thawd, and have it started with the host".into());
    }
    let remembered: &[&str] = if remembers { &[ENABLED] } else { &[] };
    done.configured = file.install(&block, remembered)?;
    restart(options, &mut done)?;
    Ok(done)
}

/// Undoes it.
///
/// # Errors
/// [`ErrorKind::RuntimeInUse`]: there are sandboxes, which no thawd would end any more.
pub fn uninstall(options: &Options, paths: &Paths) -> Result<Done, Error> {
    let file = ConfigFile::read(&options.config)?;
    let mut done = Done::default();
    if !file.has_block() {
        // Fails if the block cannot be found.
        file.uninstall()?;
        return Ok(done);
    }
    let running = match paths.run.is_dir() {
        true => RunDirectory::open(&paths.run)?.running().len(),
        false => 0,
    };
    if running > 0 {
        let what = format!("sandboxes that run: {running}");
        return Err(Error::new(ErrorKind::RuntimeInUse, what));
    }
    let disables = file.remembers(ENABLED) && systemd::runs() && systemd::has(THAWD);
    done.configured = file.uninstall()?;
    restart(options, &mut done)?;
    if disables {
        systemd::control(&["disable", "--now", THAWD])?;
        done.service = true;
    }
    Ok(done)
}

fn restart(options: &Options, done: &mut Done) -> Result<(), Error> {
    if !done.configured {
        return Ok(());
    }
    if options.restart && systemd::runs() && systemd::is("active", CONTAINERD) {
        systemd::control(&["restart", CONTAINERD])?;
        done.restarted = true;
    } else {
        done.left.push("restart containerd, if it runs".into());
    }
    Ok(())
}
