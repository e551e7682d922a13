//! A network namespace that was made for a pod.
//!
//! One with nothing but its loopback is a pod without a network. One with interfaces is refused: connecting a guest to those is
//! not there yet.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::PathBuf;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::exit::{ExitCode, Failure};
use crate::sandbox::NetworkMode;

/// The network a pod with this namespace has.
pub(super) async fn mode(path: PathBuf) -> Result<NetworkMode, Failure> {
    let shown = path.display().to_string();
    let (told, found) = tokio::sync::oneshot::channel();
    // A thread of its own, which ends: a namespace that was entered is not left.
    let looking = std::thread::Builder::new()
        .name("look into netns".into())
        .spawn(move || {
            let _ = told.send(interfaces(&path));
        });
    let failed =
        |e: &std::io::Error| Failure::system(format!("cannot look into the network namespace {shown}"), e);
    looking.map_err(|e| failed(&e))?;
    let found = found
        .await
        .unwrap_or_else(|_| Err(std::io::ErrorKind::Other.into()));
    match found.map_err(|e| failed(&e))?.as_slice() {
        [] => Ok(NetworkMode::None),
        interfaces => {
            let what = format!(
                "the pod's network namespace {shown} has interfaces ({}), to which a microVM cannot be connected yet",
                interfaces.join(", ")
            );
            let remedy =
                "configure a CNI network of the loopback plugin alone, or run it with a network of thawd's";
            Err(Failure::new(ExitCode::NetworkUnavailable, what).remedy(remedy))
        }
    }
}

/// The names of those that are not the loopback.
fn interfaces(path: &std::path::Path) -> std::io::Result<Vec<String>> {
    let namespace = File::open(path)?;
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
    let table = std::fs::read_to_string("/proc/thread-self/net/dev")?;
    Ok(names(&table))
}

/// proc_net_dev(5): two lines of headings, then a line for each, its name before a colon.
fn names(table: &str) -> Vec<String> {
    let names = table
        .lines()
        .skip(2)
        .filter_map(|line| Some(line.split_once(':')?.0.trim().to_owned()));
    names.filter(|name| name != "lo").collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interfaces_are_read_from_their_table() {
        let table = "Inter-|   Receive\n face |bytes\n    lo: 1 2\n  eth0: 3 4\n";
        assert_eq!(names(table), ["eth0"]);
    }

    #[tokio::test]
    async fn what_is_no_namespace_is_an_error_that_names_it() {
        let error = mode("/dev/null".into()).await.unwrap_err();
        assert!(error.what.contains("/dev/null"), "{error}");
    }
}
