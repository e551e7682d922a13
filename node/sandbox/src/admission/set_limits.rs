//! Limits of tenants that the API has set: `THAW_DATA/tenant-limits.json`, a record ([`thaw_records`]) with an object `tenants`, by name.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use serde::{Deserialize, Serialize};
use thaw_protocol::api::TenantLimits;
use thaw_records::RecordError;
use thaw_sys::lock::Lock;

use crate::error::{Error, ErrorKind};
use crate::tenant::Tenant;

/// Under the data directory.
const FILE: &str = "tenant-limits.json";
/// Most tenants whose limits can be set.
const MOST: usize = 10_000;

/// The limits, by tenant.
#[derive(Debug, Default)]
pub(super) struct SetLimits {
    /// `None`: in memory only.
    file: Option<PathBuf>,
    limits: Mutex<BTreeMap<Tenant, TenantLimits>>,
    /// Held while the file is written.
    writing: Mutex<()>,
}

/// The file.
#[derive(Default, Serialize, Deserialize)]
struct Listed {
    tenants: BTreeMap<Tenant, TenantLimits>,
}

impl SetLimits {
    /// Reads those of a data directory.
    ///
    /// # Errors
    /// [`ErrorKind::Runtime`]: the file cannot be read. Without it, tenants would have other limits than were set.
    pub fn open(data: &Path) -> Result<SetLimits, Error> {
        let file = data.join(FILE);
        let listed = match thaw_records::read::<Listed>(&file) {
            Ok(listed) => listed,
            Err(RecordError::Missing) => Listed::default(),
            Err(e) => {
                let what = format!("{} cannot be read: {e}", file.display());
                return Err(Error::new(ErrorKind::Runtime, what)
                    .remedy("remove it: tenants then have the configured limits"));
            }
        };
        Ok(SetLimits {
            file: Some(file),
            limits: Mutex::new(listed.tenants),
            writing: Mutex::default(),
        })
    }

    pub fn get(&self, tenant: &Tenant) -> Option<TenantLimits> {
        self.limits.locked().get(tenant).copied()
    }

    pub fn tenants(&self) -> BTreeSet<Tenant> {
        self.limits.locked().keys().cloned().collect()
    }

    /// Sets the limits of a tenant, or removes them. Blocks.
    ///
    /// # Errors
    /// There are too many, or the file cannot be written.
    pub fn change(&self, tenant: &Tenant, to: Option<TenantLimits>) -> Result<(), Error> {
        let _one = self.writing.locked();
        let mut tenants = self.limits.locked().clone();
        match to {
            Some(limits) => tenants.insert(tenant.clone(), limits),
            None => tenants.remove(tenant),
        };
        if tenants.len() > MOST {
            let what = format!("limits of {MOST} tenants are set already");
            return Err(Error::new(ErrorKind::Runtime, what)
                .remedy("remove those of a tenant first, or set the default ones in thawd.toml"));
        }
        let listed = Listed { tenants };
        if let Some(file) = &self.file {
            let written = write(file, &listed);
            written.map_err(|e| Error::system(format!("cannot write {}", file.display()), &e))?;
        }
        *self.limits.locked() = listed.tenants;
        Ok(())
    }
}

/// Writes the file durably, completely or not at all.
fn write(file: &Path, listed: &Listed) -> io::Result<()> {
    let partial = file.with_extension("partial");
    let mut options = File::options();
    let mut new = options
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&partial)?;
    new.write_all(&thaw_records::encode(listed)?)?;
    new.sync_all()?;
    fs::rename(&partial, file)?;
    match file.parent() {
        Some(directory) => File::open(directory)?.sync_all(),
        None => Ok(()),
    }
}
