//! This guest, on which greetings act.

use std::sync::Arc;

use thaw_protocol::handshake::{KEEP_ENTROPY, Network, SHOW_ENTROPY};
use thaw_sys::lock::Lock;
use tokio::runtime::Handle;

use crate::error::Result;
use crate::handshake::Apply;
use crate::hotplug::Hotplug;
use crate::quiesce::Stopped;
use crate::sandbox::Sandbox;
use crate::{
    clock, entropy, error, generation, identity, kernel_command_line, kernel_limits, network, resets,
};

/// The guest whose PID 1 this agent is.
#[derive(Debug)]
pub struct Guest {
    sandbox: Arc<Sandbox>,
    runtime: Handle,
    hotplug: Hotplug,
    stopped: Option<Stopped>,
    keep_entropy: bool,
    show_entropy: bool,
}

impl Guest {
    /// Must be called before anything can be plugged.
    pub fn new(sandbox: Arc<Sandbox>, runtime: Handle) -> Self {
        Guest {
            sandbox,
            runtime,
            hotplug: Hotplug::default(),
            stopped: None,
            keep_entropy: kernel_command_line::has(KEEP_ENTROPY),
            show_entropy: kernel_command_line::has(SHOW_ENTROPY),
        }
    }

    /// Runs the test hooks that are due just before the doorbell.
    pub fn prepare(&self) {
        // The kernel would replace an old seed soon by itself, and hide that the agent did not.
        if self.test_hooks()
            && let Err(e) = entropy::renew()
        {
            error!("the random generator was not reseeded for a test: {e}");
        }
    }
}

impl Apply for Guest {
    fn entropy(&mut self, bytes: &[u8]) -> Result<()> {
        if self.keep_entropy {
            error!("{KEEP_ENTROPY}: the random generator is NOT reseeded; clones of this guest are alike");
        } else {
            entropy::reseed(bytes)?;
        }
        if self.show_entropy {
            error!("{SHOW_ENTROPY}: {}", entropy::next_bytes()?);
        }
        Ok(())
    }

    fn wall_clock(&mut self, ns: u64) -> Result<()> {
        clock::set_wall_clock(ns)
    }

    fn hostname(&mut self, name: &str, network: Option<&Network>) -> Result<()> {
        let old = rustix::system::uname().nodename().to_owned();
        identity::set_hostname(name)?;
        identity::rename_containers(&self.sandbox, &old, name)?;
        let addresses = network.iter().flat_map(|n| &n.addresses).map(|a| a.ip);
        // A link-local address is useless without its interface.
        let addresses: Vec<_> = addresses.filter(|ip| !network::is_link_local(*ip)).collect();
        let names = self.sandbox.names.locked().clone();
        identity::write_etc(name, &addresses, network.map_or(&[], |n| &n.nameservers), &names)
    }

    fn machine_id(&mut self, id: [u8; 16]) -> Result<()> {
        identity::set_machine_id(id)
    }

    fn network(&mut self, network: Option<&Network>) -> Result<()> {
        let namespaces = self.sandbox.namespaces("net");
        if !namespaces.is_empty() {
            // While the interface is down, no reset can reach a peer with which the frozen sandbox still talks.
            network::disconnect()?;
            resets::end_connections(namespaces);
        }
        match network {
            Some(network) => network::configure(network),
            None => network::disconnect(),
        }
    }

    fn cpus(&mut self, count: u8) -> Result<()> {
        self.hotplug.cpus(count)
    }

    fn memory(&mut self, mib: u32) -> Result<()> {
        self.hotplug.memory(mib)?;
        kernel_limits::follow_memory();
        Ok(())
    }

    fn generation(&mut self) -> Result<()> {
        generation::renew()
    }

    fn quiesce(&mut self) -> Result<()> {
        if self.stopped.is_none() {
            self.stopped = Some(Stopped::all(&self.sandbox, &self.runtime)?);
        }
        Ok(())
    }

    fn release(&mut self) -> Result<()> {
        self.stopped.take().map_or(Ok(()), Stopped::release)
    }

    fn test_hooks(&self) -> bool {
        self.keep_entropy || self.show_entropy
    }
}
