//! The roles of client certificates, by name or by hash.
//!
//! An authority's certificate identifies a caller. This node's administrator lists in a file what each caller may do, so neither the
//! authority nor a caller can grant a role. Invariant: a certificate has no role if the file grants its names different roles or tenants.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::path::Path;

use rustls::pki_types::CertificateDer;
use sha2::{Digest, Sha256};
use thaw_sandbox::error::Error;
use webpki::EndEntityCert;

use super::grant::{Grant, Granted, lines, read_file, unusable};

/// What errors call the file's contents.
const WHAT: &str = "roles of client certificates";
/// Most lines, without empty lines and comments.
const MOST: usize = 4096;

/// What a line of the file identifies a certificate by.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Name {
    /// A DNS name among its alternative names, in lower case.
    Dns(String),
    /// A URI among them, unchanged.
    Uri(String),
    /// SHA-256 of the whole certificate.
    Hash([u8; 32]),
}

impl Name {
    fn parse(text: &str) -> Option<Name> {
        let (kind, name) = text.split_once(':').filter(|(_, name)| !name.is_empty())?;
        match kind {
            "dns" => Some(Name::Dns(name.to_ascii_lowercase())),
            "uri" => Some(Name::Uri(name.to_owned())),
            "sha256" => hash(name).map(Name::Hash),
            _ => None,
        }
    }
}

/// As in the file.
impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Name::Dns(name) => write!(f, "dns:{name}"),
            Name::Uri(uri) => write!(f, "uri:{uri}"),
            Name::Hash(hash) => {
                f.write_str("sha256:")?;
                hash.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
        }
    }
}

/// 32 bytes as 64 hexadecimal digits, with a colon between each two or none at all.
fn hash(text: &str) -> Option<[u8; 32]> {
    let digits = text.replace(':', "");
    let mut bytes = [0; 32];
    if digits.len() != 64 || !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).ok()?;
    }
    Some(bytes)
}

/// The certificate of a connection, verified against its authority.
#[derive(Debug)]
pub struct ClientCertificate {
    whole: Vec<u8>,
    hash: Name,
    names: BTreeSet<Name>,
}

impl ClientCertificate {
    /// Reads its names.
    pub fn read(certificate: &CertificateDer<'_>) -> ClientCertificate {
        let mut names = BTreeSet::new();
        // The verifier has parsed it, so it can be read; otherwise only its hash counts.
        if let Ok(parsed) = EndEntityCert::try_from(certificate) {
            let dns = parsed
                .valid_dns_names()
                .map(|name| Name::Dns(name.to_ascii_lowercase()));
            names.extend(dns);
            names.extend(parsed.valid_uri_names().map(|uri| Name::Uri(uri.to_owned())));
        }
        ClientCertificate {
            hash: Name::Hash(Sha256::digest(certificate).into()),
            whole: certificate.to_vec(),
            names,
        }
    }

    /// The whole certificate.
    pub fn whole(&self) -> &[u8] {
        &self.whole
    }
}

/// Why a certificate has no role.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoRole {
    #[error("neither its names nor its hash is in the file of roles")]
    Unknown,
    #[error("its names have different roles or tenants in the file of roles")]
    Ambiguous,
}

/// The roles of certificates.
#[derive(Debug)]
pub struct ClientRoles(HashMap<Name, Grant>);

impl ClientRoles {
    /// Reads a file of roles: `dns:NAME`, `uri:URI` or `sha256:HASH`, then `role=ROLE` and `tenant=TENANT`, a line; `#` begins a comment.
    ///
    /// # Errors
    /// `config-invalid`: others can write the file, or a line is invalid.
    pub fn read(path: &Path) -> Result<ClientRoles, Error> {
        let text = read_file(path, WHAT, 0o022)?;
        ClientRoles::parse(&text).map_err(|why| unusable(path, WHAT, &why))
    }

    fn parse(text: &str) -> Result<ClientRoles, String> {
        let mut roles = HashMap::new();
        for (number, line) in lines(text) {
            let wrong = |what: &str| format!("line {number}: {what}");
            let mut words = line.split_whitespace();
            let name = words.next().and_then(Name::parse);
            let name = name.ok_or_else(|| wrong("this is to begin with dns:NAME, uri:URI or sha256:HASH"))?;
            let granted = Granted::parse(words).map_err(|why| wrong(&why))?;
            if granted.expires.is_some() {
                return Err(wrong("a certificate says itself when it expires"));
            }
            let grant = granted.grant.ok_or_else(|| wrong("there is no role="))?;
            if roles.insert(name, grant).is_some() {
                return Err(wrong("this name was there before"));
            }
        }
        match roles.len() {
            // An empty file is valid: it takes access away, such as from a certificate that was lost.
            0..=MOST => Ok(ClientRoles(roles)),
            _ => Err(format!("there are more than {MOST}")),
        }
    }

    /// What a certificate is granted, and the first of its names that the file has. Its hash has precedence over its names.
    ///
    /// # Errors
    /// It has no role.
    pub fn of(&self, certificate: &ClientCertificate) -> Result<(&Name, &Grant), NoRole> {
        if let Some(known) = self.0.get_key_value(&certificate.hash) {
            return Ok(known);
        }
        let names = certificate.names.iter();
        let mut known = names.filter_map(|name| self.0.get_key_value(name));
        let first = known.next().ok_or(NoRole::Unknown)?;
        match known.all(|(_, grant)| grant == first.1) {
            true => Ok(first),
            false => Err(NoRole::Ambiguous),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use rustls::pki_types::pem::PemObject;

    use super::*;
    use crate::api::grant::Role;

    fn certificate(name: &str) -> ClientCertificate {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/certificates");
        let der = CertificateDer::from_pem_file(folder.join(format!("{name}.pem"))).unwrap();
        ClientCertificate::read(&der)
    }

    fn of(text: &str, certificate: &ClientCertificate) -> Result<(Role, Option<String>), NoRole> {
        let roles = ClientRoles::parse(text).unwrap();
        let (_, grant) = roles.of(certificate)?;
        Ok((grant.role(), grant.tenant().map(|t| t.to_string())))
    }

    #[test]
    fn certificate_is_known_by_its_names_and_its_hash() {
        let (client, workload) = (certificate("client"), certificate("workload"));
        let acme = |role| Ok((role, Some("acme".into())));
        let Name::Hash(hash) = &workload.hash else {
            panic!()
        };
        let hash: Vec<String> = hash.iter().map(|b| format!("{b:02X}")).collect();
        assert_eq!(of("dns:client role=admin", &client), Ok((Role::Admin, None)));
        assert_eq!(of("dns:CLIENT role=read tenant=acme", &client), acme(Role::Read));
        let uri = "uri:spiffe://cluster.example/ns/acme/sa/builder role=operate tenant=acme\n";
        assert_eq!(of(uri, &workload), acme(Role::Operate));
        let by_hash = |hash: String| format!("{uri}sha256:{hash} role=read tenant=acme");
        assert_eq!(of(&by_hash(hash.concat()), &workload), acme(Role::Read));
        assert_eq!(of(&by_hash(hash.join(":")), &workload), acme(Role::Read));
        // Names must match exactly: no prefix, no other kind, no wildcard.
        for near in [
            "",
            "dns:clien role=admin",
            "dns:client.example role=admin",
            "dns:* role=admin",
            "uri:client role=admin",
            "uri:spiffe://cluster.example/ns/acme role=admin",
            "dns:spiffe://cluster.example/ns/acme/sa/builder role=admin",
        ] {
            assert_eq!(of(near, &client), Err(NoRole::Unknown), "{near}");
            assert_eq!(of(near, &workload), Err(NoRole::Unknown), "{near}");
        }
    }

    #[test]
    fn renewed_certificate_with_a_named_role_is_the_same_caller() {
        let old = certificate("workload");
        let renewed = ClientCertificate {
            whole: b"another".to_vec(),
            hash: Name::Hash([7; 32]),
            names: old.names.clone(),
        };
        let known_as = |text: &str, certificate: &ClientCertificate| {
            let roles = ClientRoles::parse(text).unwrap();
            roles.of(certificate).map(|(name, _)| name.to_string())
        };
        let uri = "uri:spiffe://cluster.example/ns/acme/sa/builder";
        let line = format!("{uri} role=operate tenant=acme\n");
        assert_eq!(known_as(&line, &old).unwrap(), uri);
        assert_eq!(known_as(&line, &renewed).unwrap(), uri);
        // A certificate known by its hash is a different caller.
        let by_hash = format!("sha256:{}", "07".repeat(32));
        let both = format!("{line}{by_hash} role=operate tenant=acme");
        assert_eq!(known_as(&both, &renewed).unwrap(), by_hash);
        assert_eq!(known_as(&both, &old).unwrap(), uri);
    }

    #[test]
    fn names_that_disagree_grant_nothing() {
        let workload = certificate("workload");
        let uri = "uri:spiffe://cluster.example/ns/acme/sa/builder role=operate tenant=acme\n";
        let and = |line: &str| format!("{uri}{line}");
        for other in [
            "dns:builder.acme.example role=admin",
            "dns:builder.acme.example role=read tenant=acme",
            "dns:builder.acme.example role=operate tenant=other",
        ] {
            assert_eq!(of(&and(other), &workload), Err(NoRole::Ambiguous), "{other}");
        }
        let same = and("dns:builder.acme.example role=operate tenant=acme");
        assert!(of(&same, &workload).is_ok());
    }

    #[test]
    fn what_is_no_file_of_roles_is_named_by_its_line() {
        let hash = "ab".repeat(32);
        for (text, why) in [
            ("client role=admin".to_owned(), "begin with"),
            ("dns: role=admin".into(), "begin with"),
            ("cn:client role=admin".into(), "begin with"),
            (format!("sha256:{} role=admin", &hash[1..]), "begin with"),
            (format!("sha256:{hash}ab role=admin"), "begin with"),
            (format!("sha256:+{} role=admin", &hash[1..]), "begin with"),
            ("dns:client".into(), "no role="),
            ("dns:client role=operate".into(), "tenant="),
            ("dns:client role=admin expires=2027-01-01".into(), "expires"),
            (
                "dns:client role=admin\nDNS:client role=admin".into(),
                "begin with",
            ),
            (
                "dns:client role=admin\ndns:Client role=read tenant=a".into(),
                "line 2",
            ),
        ] {
            let error = ClientRoles::parse(&text).unwrap_err();
            assert!(error.contains(why) && error.contains("line"), "{text}: {error}");
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "dns:client role=admin").unwrap();
        std::fs::set_permissions(file.path(), PermissionsExt::from_mode(0o644)).unwrap();
        assert!(ClientRoles::read(file.path()).is_ok());
        std::fs::set_permissions(file.path(), PermissionsExt::from_mode(0o664)).unwrap();
        assert!(ClientRoles::read(file.path()).is_err());
    }
}
