//! The ingredients of a template, and the key computed from them.

use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::sync::OnceLock;

use serde::Serialize;
use thaw_protocol::control::CpuBaseline;

use super::Recipe;
use crate::error::{Error, ErrorKind};
use crate::paths::Paths;
use crate::snapshot::manifest::FORMAT;
use crate::snapshot::{Hash, SnapshotError, Stamps};

/// The name of a template: 32 hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key(String);

impl Key {
    /// Its digits.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Enough digits for people to tell templates apart.
    pub fn short(&self) -> &str {
        &self.0[..12]
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for Key {
    type Err = ();

    fn from_str(text: &str) -> Result<Key, ()> {
        let hexadecimal = text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        match text.len() == 32 && hexadecimal {
            true => Ok(Key(text.to_owned())),
            false => Err(()),
        }
    }
}

/// Everything that a template depends on. Anything else must not affect it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Ingredients {
    format: u32,
    pub kernel: Hash,
    pub guest_image: Hash,
    /// Hash of the thaw-vmm binary: a template contains its devices' states.
    pub vmm: Hash,
    pub command_line: String,
    pub vcpus: u8,
    pub memory_mib: u32,
    pub baseline: CpuBaseline,
    /// The properties of this host that a guest sees.
    processor: String,
}

/// The hashes of the files among the ingredients.
struct Hashes {
    kernel: Hash,
    guest_image: Hash,
    vmm: Hash,
}

impl Ingredients {
    /// Hashes the ingredients of a template made now, with `vmm` as the thaw-vmm binary. Blocks, unless all of them were hashed before.
    ///
    /// # Errors
    /// [`ErrorKind::KernelMissing`], [`ErrorKind::GuestImageMissing`], [`ErrorKind::VmmMissing`].
    pub fn gather(paths: &Paths, vmm: &Path, recipe: &Recipe, stamps: &Stamps) -> Result<Ingredients, Error> {
        let hash = |path: &Path, kind: ErrorKind, what: &str| {
            stamps.hash_file(path).map_err(|e| match e {
                SnapshotError::Io { source, .. } => Error::new(
                    kind,
                    format!("cannot read the {what}: {}: {source}", path.display()),
                ),
                other => other.into(),
            })
        };
        let hashes = Hashes {
            kernel: hash(&paths.kernel, ErrorKind::KernelMissing, "guest kernel")?,
            guest_image: hash(&paths.guest_image, ErrorKind::GuestImageMissing, "guest image")?,
            vmm: hash(vmm, ErrorKind::VmmMissing, "VMM")?,
        };
        Ok(Ingredients::of(recipe, hashes))
    }

    /// As [`Ingredients::gather`], if this process remembers all hashes. Reads no file.
    pub(super) fn remembered(
        paths: &Paths,
        vmm: &Path,
        recipe: &Recipe,
        stamps: &Stamps,
    ) -> Option<Ingredients> {
        let hashes = Hashes {
            kernel: stamps.remembered_hash(&paths.kernel)?,
            guest_image: stamps.remembered_hash(&paths.guest_image)?,
            vmm: stamps.remembered_hash(vmm)?,
        };
        Some(Ingredients::of(recipe, hashes))
    }

    fn of(recipe: &Recipe, hashes: Hashes) -> Ingredients {
        Ingredients {
            format: FORMAT,
            kernel: hashes.kernel,
            guest_image: hashes.guest_image,
            vmm: hashes.vmm,
            command_line: recipe.command_line.clone(),
            vcpus: recipe.shape.vcpus,
            memory_mib: recipe.shape.memory_mib,
            baseline: recipe.shape.cpu,
            processor: Processor::of_this_host().matters_for(recipe.shape.cpu),
        }
    }

    /// The key.
    pub fn key(&self) -> Key {
        // All keys are strings.
        let text = serde_json::to_vec(self).expect("ingredients are plain data");
        Key(Hash::of(&text).to_string()[..32].to_owned())
    }
}

/// The host's processor, from `/proc/cpuinfo`, and its kernel, because KVM decides which features a guest sees.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Processor {
    vendor: String,
    model: String,
    /// Family, model, stepping.
    numbers: [String; 3],
    flags: Vec<String>,
    kernel: String,
}

impl Processor {
    /// The processor of this host, read once: neither it nor its kernel changes while this process runs.
    pub fn of_this_host() -> &'static Processor {
        static PROCESSOR: OnceLock<Processor> = OnceLock::new();
        PROCESSOR.get_or_init(|| {
            let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
            let kernel = rustix::system::uname().release().to_string_lossy().into_owned();
            Processor::parse(&text, kernel)
        })
    }

    /// Parses the first processor: all processors of a KVM host are of one kind.
    fn parse(cpuinfo: &str, kernel: String) -> Processor {
        let value = |name: &str| {
            let lines = cpuinfo.lines().take_while(|l| !l.is_empty());
            let mut pairs = lines.filter_map(|l| l.split_once(':'));
            let found = pairs.find(|(key, _)| key.trim() == name);
            found.map_or(String::new(), |(_, value)| value.trim().to_owned())
        };
        let mut flags: Vec<String> = value("flags").split_whitespace().map(str::to_owned).collect();
        flags.sort();
        Processor {
            vendor: value("vendor_id"),
            model: value("model name"),
            numbers: ["cpu family", "model", "stepping"].map(value),
            flags,
            kernel,
        }
    }

    /// The description for people.
    pub fn describe(&self) -> String {
        let [family, model, stepping] = &self.numbers;
        format!(
            "{} {} (family {family}, model {model}, stepping {stepping})",
            self.vendor, self.model
        )
    }

    /// The properties that a guest of this baseline sees: all, or only the vendor.
    fn matters_for(&self, baseline: CpuBaseline) -> String {
        match baseline {
            CpuBaseline::Host => {
                let [family, model, stepping] = &self.numbers;
                let flags = self.flags.join(" ");
                format!(
                    "{} {family} {model} {stepping} {} {flags}",
                    self.vendor, self.kernel
                )
            }
            CpuBaseline::V2 | CpuBaseline::V3 | CpuBaseline::V4 => self.vendor.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::template::Shape;

    const CPUINFO: &str = "\
processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 17
model name\t: AMD EPYC
stepping\t: 1
flags\t\t: fpu sse2 avx2

processor\t: 1
vendor_id\t: Other
";

    #[test]
    fn processors_are_told_apart_as_far_as_the_baseline_shows() {
        let one = Processor::parse(CPUINFO, "6.1".into());
        assert_eq!(
            one.describe(),
            "AuthenticAMD AMD EPYC (family 25, model 17, stepping 1)"
        );
        let reordered = Processor::parse(&CPUINFO.replace("fpu sse2 avx2", "avx2 fpu sse2"), "6.1".into());
        assert_eq!(one, reordered);
        let same = |other: &Processor, baseline| one.matters_for(baseline) == other.matters_for(baseline);
        for changed in [
            Processor::parse(&CPUINFO.replace("sse2 avx2", "sse2"), "6.1".into()),
            Processor::parse(&CPUINFO.replace("stepping\t: 1", "stepping\t: 2"), "6.1".into()),
            Processor::parse(CPUINFO, "6.12".into()),
        ] {
            assert!(!same(&changed, CpuBaseline::Host) && same(&changed, CpuBaseline::V3));
        }
        let other = Processor::parse(&CPUINFO.replace("AuthenticAMD", "GenuineIntel"), "6.1".into());
        assert!(!same(&other, CpuBaseline::V3));
    }

    #[test]
    fn every_ingredient_makes_another_key() {
        let place = tempfile::tempdir().unwrap();
        let stamps = Stamps::open(&place.path().join("stamps")).unwrap();
        let (a, b) = (place.path().join("a"), place.path().join("b"));
        std::fs::write(&a, "a").unwrap();
        std::fs::write(&b, "b").unwrap();
        let of = |text: &[u8]| Hash::of(text);
        let base = Ingredients {
            format: FORMAT,
            kernel: of(b"k"),
            guest_image: of(b"g"),
            vmm: of(b"v"),
            command_line: "quiet".into(),
            vcpus: 4,
            memory_mib: 128,
            baseline: CpuBaseline::Host,
            processor: "p".into(),
        };
        let changes: [fn(&mut Ingredients); 9] = [
            |i| i.format += 1,
            |i| i.kernel = Hash::of(b"x"),
            |i| i.guest_image = Hash::of(b"x"),
            |i| i.vmm = Hash::of(b"x"),
            |i| i.command_line.push('!'),
            |i| i.vcpus += 1,
            |i| i.memory_mib += 1,
            |i| i.baseline = CpuBaseline::V2,
            |i| i.processor.push('!'),
        ];
        let mut keys = vec![base.key()];
        for change in changes {
            let mut other = base.clone();
            change(&mut other);
            keys.push(other.key());
        }
        assert_eq!(base.key(), base.clone().key());
        assert_eq!(keys[0].as_str().parse(), Ok(keys[0].clone()));
        keys.sort();
        keys.dedup();
        assert_eq!(keys.len(), changes.len() + 1);

        let recipe = Recipe {
            shape: Shape::default(),
            command_line: String::new(),
        };
        let paths = |kernel: &Path, guest: &Path| Paths {
            data: place.path().into(),
            run: place.path().into(),
            kernel: kernel.into(),
            guest_image: guest.into(),
        };
        let kind = |p: Paths, vmm: &Path| Ingredients::gather(&p, vmm, &recipe, &stamps).unwrap_err().kind;
        let none = place.path().join("none");
        assert_eq!(kind(paths(&none, &b), &a), ErrorKind::KernelMissing);
        assert_eq!(kind(paths(&a, &none), &a), ErrorKind::GuestImageMissing);
        assert_eq!(kind(paths(&a, &b), &none), ErrorKind::VmmMissing);
    }

    #[test]
    fn keys_are_digits_and_nothing_else() {
        let good = "0123456789abcdef0123456789abcdef";
        assert_eq!(good.parse::<Key>().unwrap().short(), "0123456789ab");
        for bad in [
            "",
            "..",
            "0123",
            &good.to_uppercase(),
            &format!("{good}0"),
            "../3456789abcdef0123456789abcdef",
        ] {
            assert!(bad.parse::<Key>().is_err(), "{bad}");
        }
    }
}
