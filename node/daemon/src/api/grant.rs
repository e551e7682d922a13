//! The role and the tenant of a caller.
//!
//! The files of tokens and of client certificates grant them with the same words after each caller: `role=ROLE`, `tenant=TENANT` and
//! `expires=YYYY-MM-DD`. Invariant: every caller except an administrator has a tenant.

use std::fmt;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::str::FromStr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sandbox::tenant::Tenant;

/// Maximum size of a file, bytes.
const MAX_FILE: u64 = 1 << 20;
/// A day, seconds.
const DAY: u64 = 24 * 60 * 60;

/// A role. Each includes the roles before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// May read the sandboxes of its tenant.
    Read,
    /// May also create, change and delete them, and run processes in them.
    Operate,
    /// May do everything for every tenant. Only this role may name files and ports of the host.
    Admin,
}

impl Role {
    /// All roles.
    pub const ALL: [Role; 3] = [Role::Read, Role::Operate, Role::Admin];

    /// Its name in files and in the OpenAPI document.
    pub fn name(self) -> &'static str {
        match self {
            Role::Read => "read",
            Role::Operate => "operate",
            Role::Admin => "admin",
        }
    }

    /// Whether it includes the role `least`.
    pub fn suffices(self, least: Role) -> bool {
        self >= least
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Role {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Role, &'static str> {
        let named = Role::ALL.into_iter().find(|role| role.name() == text);
        named.ok_or("role is read, operate or admin")
    }
}

/// A role and a tenant.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Grant {
    role: Role,
    tenant: Option<Tenant>,
}

impl Grant {
    /// An administrator without a tenant.
    pub fn admin() -> Grant {
        Grant {
            role: Role::Admin,
            tenant: None,
        }
    }

    /// A role within a tenant. For an administrator, the tenant is that of the sandboxes it creates.
    ///
    /// # Errors
    /// Only an administrator may have no tenant.
    pub fn new(role: Role, tenant: Option<Tenant>) -> Result<Grant, &'static str> {
        match (role, &tenant) {
            (Role::Read | Role::Operate, None) => Err("a role other than admin needs tenant="),
            _ => Ok(Grant { role, tenant }),
        }
    }

    /// The role.
    pub fn role(&self) -> Role {
        self.role
    }

    /// The tenant of the sandboxes it creates.
    pub fn tenant(&self) -> Option<&Tenant> {
        self.tenant.as_ref()
    }
}

/// The first day (UTC) on which a token is no longer valid, in days since the Unix epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Expiry(u64);

impl Expiry {
    /// Whether that day has come.
    pub fn is_over(self, now: SystemTime) -> bool {
        let since = now.duration_since(UNIX_EPOCH).unwrap_or_default();
        since.as_secs() / DAY >= self.0
    }

    /// The first moment of that day.
    pub fn begins(self) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(self.0 * DAY)
    }
}

impl FromStr for Expiry {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Expiry, &'static str> {
        let wrong = "expires is a day of the calendar: YYYY-MM-DD";
        let number = |range: std::ops::Range<usize>| {
            let digits = text.get(range).filter(|d| d.bytes().all(|b| b.is_ascii_digit()));
            digits.and_then(|d| d.parse::<u64>().ok()).ok_or(wrong)
        };
        let bytes = text.as_bytes();
        if bytes.len() != 10 || bytes[4] != b'-' || bytes[7] != b'-' {
            return Err(wrong);
        }
        let (year, month, day) = (number(0..4)?, number(5..7)?, number(8..10)?);
        let is_leap =
            |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
        let days_of = |month: u64| match month {
            4 | 6 | 9 | 11 => 30,
            2 if is_leap(year) => 29,
            2 => 28,
            _ => 31,
        };
        if year < 1970 || !(1..=12).contains(&month) || !(1..=days_of(month)).contains(&day) {
            return Err(wrong);
        }
        let before: u64 = (1970..year)
            .map(|year| if is_leap(year) { 366 } else { 365 })
            .sum();
        let months: u64 = (1..month).map(days_of).sum();
        Ok(Expiry(before + months + day - 1))
    }
}

/// What a line of a file grants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Granted {
    /// `None` if the line names no role.
    pub grant: Option<Grant>,
    pub expires: Option<Expiry>,
}

impl Granted {
    /// Whether a word is a term of a grant (`role=`, `tenant=`, `expires=`).
    pub fn is_term(word: &str) -> bool {
        ["role=", "tenant=", "expires="]
            .iter()
            .any(|term| word.starts_with(term))
    }

    /// Parses the words that follow a line's caller. Errors quote none of them, because one may be a token.
    ///
    /// # Errors
    /// A word is unknown or repeated, or requires another that is missing.
    pub fn parse<'a>(words: impl Iterator<Item = &'a str>) -> Result<Granted, String> {
        let (mut role, mut tenant, mut expires) = (None, None, None);
        for word in words {
            let (key, value) = word.split_once('=').unwrap_or((word, ""));
            match key {
                "role" => once(&mut role, key, value.parse::<Role>()?)?,
                "tenant" => once(
                    &mut tenant,
                    key,
                    value.parse::<Tenant>().map_err(|e| e.to_string())?,
                )?,
                "expires" => once(&mut expires, key, value.parse::<Expiry>()?)?,
                _ => return Err("a word is neither role=, tenant= nor expires=".into()),
            }
        }
        let grant = match (role, tenant) {
            (None, None) => None,
            (None, Some(_)) => return Err("tenant= goes with role=".into()),
            (Some(role), tenant) => Some(Grant::new(role, tenant)?),
        };
        Ok(Granted { grant, expires })
    }
}

fn once<T>(into: &mut Option<T>, key: &str, value: T) -> Result<(), String> {
    match into.replace(value) {
        None => Ok(()),
        Some(_) => Err(format!("{key}= comes twice")),
    }
}

/// Reads a file of credentials. Its mode must have none of the bits `refused`; errors call its contents `what`.
///
/// # Errors
/// `config-invalid`: the file cannot be read, is too large, or others have access to it.
pub fn read_file(path: &Path, what: &str, refused: u32) -> Result<String, Error> {
    let invalid = |why: String| unusable(path, what, &why);
    let file = std::fs::File::open(path).map_err(|e| invalid(e.to_string()))?;
    let metadata = file.metadata().map_err(|e| invalid(e.to_string()))?;
    if metadata.mode() & refused != 0 {
        let why = format!("its mode is {:o}", metadata.mode() & 0o777);
        return Err(invalid(why).remedy("make it its owner's alone: chmod 600"));
    }
    let mut text = String::new();
    let read = file.take(MAX_FILE + 1).read_to_string(&mut text);
    read.map_err(|e| invalid(e.to_string()))?;
    match text.len() as u64 > MAX_FILE {
        true => Err(invalid(format!("it is larger than {MAX_FILE} bytes"))),
        false => Ok(text),
    }
}

/// The error for a file of credentials that cannot be used.
pub fn unusable(path: &Path, what: &str, why: &str) -> Error {
    let what = format!("the {what} in {} cannot be used: {why}", path.display());
    Error::new(ErrorKind::ConfigInvalid, what)
}

/// The lines of such a file with their numbers, without empty lines and comments (`#`).
pub fn lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let numbered = text.lines().enumerate().map(|(at, line)| (at + 1, line.trim()));
    numbered.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn granted(words: &str) -> Result<Granted, String> {
        Granted::parse(words.split_whitespace())
    }

    #[test]
    fn roles_suffice_for_the_lesser() {
        for (at, role) in Role::ALL.into_iter().enumerate() {
            for (other, least) in Role::ALL.into_iter().enumerate() {
                assert_eq!(role.suffices(least), at >= other);
            }
            assert_eq!(role.name().parse(), Ok(role));
        }
    }

    #[test]
    fn line_grants_a_role_and_a_tenant() {
        let acme: Option<Tenant> = Some("acme".parse().unwrap());
        for role in Role::ALL {
            let said = granted(&format!("tenant=acme role={role}"))
                .unwrap()
                .grant
                .unwrap();
            assert_eq!((said.role(), said.tenant()), (role, acme.as_ref()));
        }
        assert_eq!(granted("").unwrap(), Granted::default());
        assert_eq!(granted("role=admin").unwrap().grant, Some(Grant::admin()));
        let dated = granted("expires=2027-01-01").unwrap();
        assert!(dated.grant.is_none() && dated.expires.is_some());
        for (wrong, why) in [
            ("role=root", "role is"),
            ("role=Admin", "role is"),
            ("role=", "role is"),
            ("role", "role is"),
            ("role=read", "tenant="),
            ("role=operate", "tenant="),
            ("tenant=acme", "role="),
            ("tenant= role=admin", "tenant is"),
            ("tenant=a/b role=read", "tenant is"),
            ("role=read role=admin tenant=a", "twice"),
            ("role=read tenant=a tenant=b", "twice"),
            ("rôle=admin", "neither"),
            ("secret", "neither"),
            ("expires=never", "expires is"),
        ] {
            let error = granted(wrong).unwrap_err();
            assert!(
                error.contains(why) && !error.contains("secret"),
                "{wrong}: {error}"
            );
        }
    }

    #[test]
    fn expiry_is_the_first_moment_of_its_day() {
        for (text, seconds) in [
            ("1970-01-02", 86_400),
            ("2000-02-29", 951_782_400),
            ("2000-03-01", 951_868_800),
            ("2027-01-01", 1_798_761_600),
            ("2100-03-01", 4_107_542_400),
        ] {
            let expiry: Expiry = text.parse().unwrap();
            let at = UNIX_EPOCH + Duration::from_secs(seconds);
            assert!(expiry.is_over(at), "{text}");
            assert_eq!(expiry.begins(), at, "{text}");
            assert!(!expiry.is_over(at - Duration::from_secs(1)), "{text}");
        }
        for wrong in [
            "",
            "2027",
            "2027-1-1",
            "2027-13-01",
            "2027-00-01",
            "2027-02-29",
            "2100-02-29",
            "2027-04-31",
            "2027-01-00",
            "1969-12-31",
            "2027-01-01T",
            "2027/01/01",
            "+027-01-01",
            "20270101--",
            "２０27-01-01",
        ] {
            assert!(wrong.parse::<Expiry>().is_err(), "{wrong}");
        }
    }
}
