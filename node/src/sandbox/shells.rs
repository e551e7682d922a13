//! Machines made before anybody knows whose they will be: a thaw-vmm with an empty machine of a shape that is in demand.
//!
//! Each has a directory among the run directory's spares, with a record, as a sandbox has one: what a killed thawd leaves
//! of it is found and removed as a sandbox's is. Invariant: a thaw-vmm is in a record before it has a machine, and from
//! then on in at least one; a sandbox that takes a shell writes it into its own record before it takes anything else.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use thaw_pools::cgroup::Cgroup;
use thaw_pools::failpoint::{Failpoint, reach};
use thaw_pools::machine::{MachineError, Place, Process, Vm};
use thaw_pools::plan::Plan;
use thaw_pools::pool::Pool;
use thaw_pools::resource::{Kind, SlowReason, Unfit};
use thaw_pools::statistics::PoolStatistics;
use thaw_pools::vmm;
use thaw_protocol::control::MachineSpec;

use super::create::new_record;
use super::files::open_kvm;
use super::machine::{LOG, enter_cgroup};
use super::{Pools, Resources};
use crate::config::pools::ShellsConfig;
use crate::control_client::{CallError, ControlClient};
use crate::exit::{ExitCode, Failure};
use crate::state::{Record, RunDirectory, SandboxDirectory};

/// A machine nobody has yet.
pub(super) struct Shell {
    vm: Vm,
    cgroup: Option<Cgroup>,
    directory: SandboxDirectory,
}

impl Shell {
    /// Makes it a sandbox's. If that fails, what is not the sandbox's by then is ended here.
    pub(super) fn become_of(self, resources: &mut Resources, record: &mut Record) -> Result<(), Failure> {
        let (process, control, _) = self.vm.into_parts();
        record.vmm = Some(process.record());
        record.cgroup = self.cgroup.as_ref().map(|c| c.name().to_owned());
        (resources.vmm, resources.cgroup) = (Some(process), self.cgroup);
        resources.directory.write(record)?;
        reach(Failpoint::ShellTaken);
        resources.control = Some(ControlClient::new(control)?.into());
        let moves = [
            (
                self.directory.control_socket(),
                resources.directory.control_socket(),
                Failpoint::ShellSocketMoved,
            ),
            (
                self.directory.path().join(LOG),
                resources.directory.path().join(LOG),
                Failpoint::ShellLogMoved,
            ),
        ];
        for (from, to, moved) in moves {
            std::fs::rename(&from, &to)
                .map_err(|e| Failure::system(format!("cannot move {}", from.display()), &e))?;
            reach(moved);
        }
        drop(self.directory);
        reach(Failpoint::ShellLeft);
        Ok(())
    }
}

/// The kind: shells, told apart by their machines.
struct Shells {
    spares: RunDirectory,
    pools: Arc<Pools>,
}

impl Shells {
    fn begin(
        &self,
        machine: &MachineSpec,
        cgroup: Option<&Cgroup>,
    ) -> Result<(Vm, SandboxDirectory), Failure> {
        let (program, kvm) = (vmm::find()?, open_kvm(Path::new("/dev/kvm"))?);
        let mut record = Record {
            image: "(spare)".into(),
            cgroup: cgroup.map(|c| c.name().to_owned()),
            tethered: machine.tethered,
            vcpus: machine.vcpus,
            memory_mib: machine.memory_mib,
            ..new_record()?
        };
        let directory = self.spares.create(&record)?;
        reach(Failpoint::ShellDirectoryMade);
        let place = Place {
            control: directory.control_socket(),
            log: directory.path().join(LOG),
            tethered: machine.tethered,
        };
        let process = Process::start(&program, &place).map_err(failure)?;
        record.vmm = Some(process.process().record());
        directory.write(&record)?;
        reach(Failpoint::ShellRecorded);
        enter_cgroup(cgroup, process.process());
        reach(Failpoint::ShellInCgroup);
        let shell = process.create(kvm.as_fd(), machine.clone()).map_err(failure)?;
        reach(Failpoint::ShellMachineMade);
        Ok((Vm::Shell(shell), directory))
    }
}

fn failure(error: MachineError) -> Failure {
    match error {
        MachineError::Start(e) => e.into(),
        MachineError::Refused(e) => CallError::Refused(e).into(),
        other => Failure::new(ExitCode::VmmFailed, other.to_string()),
    }
}

impl Kind for Shells {
    const NAME: &'static str = "shell";
    type Want = MachineSpec;
    type Resource = Shell;
    type Error = Failure;

    fn make(&self, machine: &MachineSpec) -> Result<Shell, Failure> {
        // Without one, it lives in ours.
        let cgroup = self.pools.cgroups.claim(&()).ok().map(|c| c.resource);
        match self.begin(machine, cgroup.as_ref()) {
            Ok((vm, directory)) => Ok(Shell {
                vm,
                cgroup,
                directory,
            }),
            Err(e) => {
                cgroup.into_iter().for_each(|c| self.pools.cgroups.release(c));
                Err(e)
            }
        }
    }

    fn check(&self, shell: &Shell) -> Result<(), Unfit> {
        shell.vm.check()
    }

    fn destroy(&self, shell: Shell) {
        // Killed and reaped, before what it lives in goes.
        drop(shell.vm);
        shell
            .cgroup
            .into_iter()
            .for_each(|c| self.pools.cgroups.release(c));
        drop(shell.directory);
    }
}

/// Pools of shells, one each for the shapes that were lately in demand.
#[derive(Debug, Default)]
pub struct ShellPools {
    /// None: nothing is made ahead.
    plan: Option<(ShellsConfig, usize)>,
    recent: Mutex<Recent>,
}

#[derive(Debug)]
struct Recent {
    closed: bool,
    /// What pools that are closed did, and claims for which there was none.
    past: PoolStatistics,
    /// The last used first.
    pools: VecDeque<(MachineSpec, Arc<Pool<Shells>>)>,
    /// Shapes used once, lately; their second use makes a pool.
    once: VecDeque<MachineSpec>,
}

impl Default for Recent {
    fn default() -> Recent {
        Recent {
            closed: false,
            past: PoolStatistics::none(Shells::NAME),
            pools: VecDeque::new(),
            once: VecDeque::new(),
        }
    }
}

impl ShellPools {
    /// As the configuration says, `makers` at once of each shape.
    pub fn new(config: ShellsConfig, makers: usize) -> ShellPools {
        ShellPools {
            plan: (config.shapes > 0 && config.marks().high() > 0).then_some((config, makers)),
            recent: Mutex::default(),
        }
    }

    /// Takes a shell of this machine, or says why there is none. Does not block. A shape that is asked for again has a
    /// pool from then on; that of the shape that was not asked for the longest is closed for it.
    pub(super) fn ready(
        &self,
        run: &RunDirectory,
        pools: &Arc<Pools>,
        machine: &MachineSpec,
    ) -> Result<Shell, SlowReason> {
        // One that is tethered is for a process that makes no other.
        let plan = self.plan.as_ref().filter(|_| !machine.tethered);
        let (config, makers) = plan.ok_or(SlowReason::NoPool)?;
        let (pool, outdated) = {
            let mut recent = self.lock();
            if recent.closed {
                return Err(SlowReason::Closed);
            }
            let pool = recent.used(machine, usize::from(config.shapes), || {
                let kind = Shells {
                    spares: run.spares(),
                    pools: pools.clone(),
                };
                let plan = Plan {
                    makers: *makers,
                    ..Plan::new(machine.clone(), config.marks())
                };
                Pool::filled(kind, plan)
            });
            if pool.is_none() {
                recent.past.missed(SlowReason::NoPool);
            }
            (pool, recent.outdated(usize::from(config.shapes)))
        };
        if let Some(outdated) = outdated {
            // Its shells are ended; nobody waits for that.
            let closing = std::thread::Builder::new().name("close shells".into());
            let closed = closing.spawn(move || outdated.close());
            if let Err(e) = closed {
                tracing::warn!("a pool of shells is closed on a caller's path: {e}");
            }
        }
        let claim = pool.ok_or(SlowReason::NoPool)?.ready(machine);
        claim.map(|c| c.resource).map_err(|miss| miss.reason)
    }

    /// What all of them have, and did since the first was made.
    pub fn statistics(&self) -> PoolStatistics {
        let (past, pools) = {
            let recent = self.lock();
            (recent.past.clone(), recent.pools.clone())
        };
        pools
            .iter()
            .fold(past, |sum, (_, pool)| sum.and(&pool.statistics()))
    }

    /// Makes none any more, and ends all. Blocks until that is done.
    pub fn close(&self) {
        let pools = {
            let mut recent = self.lock();
            recent.closed = true;
            std::mem::take(&mut recent.pools)
        };
        pools.iter().for_each(|(_, pool)| pool.close());
    }

    fn lock(&self) -> MutexGuard<'_, Recent> {
        self.recent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Recent {
    /// The pool of a shape that is used now, if it has one, or now gets one.
    fn used(
        &mut self,
        machine: &MachineSpec,
        shapes: usize,
        make: impl FnOnce() -> std::io::Result<Pool<Shells>>,
    ) -> Option<Arc<Pool<Shells>>> {
        if let Some(at) = self.pools.iter().position(|(m, _)| m == machine) {
            let found = self.pools.remove(at)?;
            let pool = found.1.clone();
            self.pools.push_front(found);
            return Some(pool);
        }
        let Some(at) = self.once.iter().position(|m| m == machine) else {
            self.once.push_front(machine.clone());
            self.once.truncate(shapes);
            return None;
        };
        self.once.remove(at);
        match make() {
            Ok(pool) => {
                let pool = Arc::new(pool);
                self.pools.push_front((machine.clone(), pool.clone()));
                Some(pool)
            }
            Err(e) => {
                tracing::warn!("no shells are made ahead: {e}");
                None
            }
        }
    }

    /// One pool more than there are to be.
    fn outdated(&mut self, shapes: usize) -> Option<Arc<Pool<Shells>>> {
        match self.pools.len() > shapes {
            true => {
                let (_, pool) = self.pools.pop_back()?;
                self.past = self.past.clone().and(&pool.statistics().closed());
                Some(pool)
            }
            false => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paths::Paths;
    use thaw_pools::cgroup::Hierarchy;
    use thaw_protocol::control::CpuBaseline;

    fn machine(vcpus: u8, tethered: bool) -> MachineSpec {
        MachineSpec {
            vcpus,
            memory_mib: 128,
            cpu: CpuBaseline::Host,
            tethered,
        }
    }

    fn place(root: &Path) -> (RunDirectory, Arc<Pools>) {
        let paths = Paths {
            data: root.join("d"),
            run: root.join("r"),
            kernel: root.join("k"),
            guest_image: root.join("g"),
        };
        let run = RunDirectory::open(&paths.run).unwrap();
        (
            run,
            Arc::new(Pools::empty(&paths, Hierarchy::None, Default::default())),
        )
    }

    #[test]
    fn a_shape_used_twice_gets_a_pool_and_the_longest_unused_loses_its_own() {
        let root = tempfile::tempdir().unwrap();
        let (run, pools) = place(root.path());
        let make = || {
            Ok(Pool::empty(Shells {
                spares: run.spares(),
                pools: pools.clone(),
            }))
        };
        let mut recent = Recent::default();
        let mut used = |vcpus: u8| {
            let pool = recent.used(&machine(vcpus, false), 2, make).is_some();
            let outdated = recent.outdated(2).is_some();
            let shapes: Vec<u8> = recent.pools.iter().map(|(m, _)| m.vcpus).collect();
            assert!(recent.once.len() <= 2);
            (pool, outdated, shapes)
        };
        assert_eq!(used(1), (false, false, vec![]));
        assert_eq!(used(1), (true, false, vec![1]));
        assert_eq!(used(2), (false, false, vec![1]));
        assert_eq!(used(2), (true, false, vec![2, 1]));
        assert_eq!(used(1), (true, false, vec![1, 2]));
        // Many shapes, each used once, take nobody's place.
        for vcpus in 3..9 {
            assert_eq!(used(vcpus), (false, false, vec![1, 2]));
        }
        assert_eq!(used(8), (true, true, vec![8, 1]));
    }

    #[test]
    fn without_a_plan_or_for_one_process_only_there_is_no_pool_and_after_the_end_none_either() {
        let root = tempfile::tempdir().unwrap();
        let (run, pools) = place(root.path());
        let why = |shells: &ShellPools, machine: &MachineSpec| {
            shells.ready(&run, &pools, machine).map(drop).unwrap_err()
        };
        assert_eq!(
            why(&ShellPools::default(), &machine(1, false)),
            SlowReason::NoPool
        );
        let shells = ShellPools::new(ShellsConfig::default(), 1);
        assert_eq!(why(&shells, &machine(1, true)), SlowReason::NoPool);
        assert_eq!(why(&shells, &machine(1, false)), SlowReason::NoPool);
        shells.close();
        assert_eq!(why(&shells, &machine(1, false)), SlowReason::Closed);
        let counted = shells.statistics();
        assert_eq!((counted.claims, counted.ready, counted.high), (1, 0, 0));
    }
}
