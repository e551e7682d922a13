//! Documents of other tools: `tests/interop/run` creates the layers and runs this.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::layer::tree::LayerTree;
use crate::layer::{LayerLimits, unpack};

use super::error::IndexError;
use super::estargz::{self, Bound};
use super::soci;
use super::testing::assert_like_unpacked;
use super::{LayerIndex, testing};

fn layers(form: &str) -> Vec<PathBuf> {
    let directory = std::env::var("THAW_INTEROP").expect("tests/interop/run says where the layers are");
    let mut layers: Vec<PathBuf> = std::fs::read_dir(Path::new(&directory).join(form))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    layers.sort();
    assert!(!layers.is_empty());
    layers
}

fn get(layer: &Path, name: &str) -> Vec<u8> {
    std::fs::read(layer.join(name)).unwrap()
}

fn name(layer: &Path) -> String {
    layer.file_name().unwrap().to_string_lossy().into_owned()
}

/// Only layers that a ztoc cannot express (a sparse file, several gzip members) are refused, with this reason.
fn known(made: Result<LayerIndex, IndexError>, layer: &Path) -> Option<LayerIndex> {
    let is_known = layer.join("inexpressible").exists();
    match made {
        Ok(index) => Some(index),
        Err(IndexError::Unsupported { what, .. }) if is_known => {
            println!("soci/{}: refused, for {what}", name(layer));
            None
        }
        Err(error) => panic!("{}: {error}", name(layer)),
    }
}

#[test]
#[ignore = "needs the layers tests/interop/run makes"]
fn ztocs() {
    let (limits, span_size) = (LayerLimits::default(), crate::span::SPAN);
    for layer in layers("soci") {
        let (stored, tar) = (get(&layer, "layer"), get(&layer, "plain.tar"));
        let size = stored.len() as u64;
        let theirs = soci::read_ztoc(&get(&layer, "ztoc"), size, &limits);
        let Some(index) = known(theirs, &layer) else {
            assert!(soci::index_layer(&stored[..], &limits, span_size, "thaw").is_err());
            continue;
        };
        assert_like_unpacked(&index, &stored, &tar);
        let ours = soci::index_layer(&stored[..], &limits, span_size, "thaw");
        if layer.join("inexpressible").exists() {
            assert!(
                matches!(ours, Err(IndexError::Unsupported { .. })),
                "{}",
                name(&layer)
            );
            println!(
                "soci/{}: their ztoc read, tree and files as unpacked; none of ours",
                name(&layer)
            );
            continue;
        }
        let ours = ours.unwrap().unwrap();
        let own = soci::read_ztoc(&ours, size, &LayerLimits::default()).unwrap();
        assert_like_unpacked(&own, &stored, &tar);
        let spans = index.content.spans.spans().len();
        println!(
            "soci/{}: their ztoc of {spans} spans read, tree and files as unpacked",
            name(&layer)
        );
        std::fs::write(layer.join("ours"), ours).unwrap();
    }
}

/// The last entry of each path, because other tools order entries differently.
fn by_path(tree: &LayerTree) -> BTreeMap<Vec<u8>, String> {
    let tree = testing::placeless(tree);
    tree.entries
        .iter()
        .map(|entry| (entry.path.clone(), format!("{:?}", entry.change)))
        .collect()
}

fn table_of(layer: &Path, stored: &[u8]) -> LayerIndex {
    let annotations: BTreeMap<String, String> =
        serde_json::from_slice(&get(layer, "annotations.json")).unwrap();
    let (size, limits) = (stored.len() as u64, LayerLimits::default());
    let slice = |range: &std::ops::Range<u64>| &stored[range.start as usize..range.end as usize];
    match estargz::bound(&annotations, size).unwrap().unwrap() {
        Bound::Gzip { toc } => {
            let location = estargz::toc_location(slice(&(size - estargz::FOOTER..size)), size).unwrap();
            estargz::read_toc(slice(&location), &toc, location.clone(), &limits).unwrap()
        }
        Bound::Zstd { stored, location } => {
            estargz::read_zstd_toc(slice(&location), &stored, location.clone(), &limits).unwrap()
        }
    }
}

#[test]
#[ignore = "needs the layers tests/interop/run makes"]
fn estargz_tables() {
    for layer in layers("estargz") {
        let (stored, tar) = (get(&layer, "layer"), get(&layer, "plain.tar"));
        let index = table_of(&layer, &stored);
        let mut data = Vec::new();
        let tree = unpack(&tar[..], &mut data, &LayerLimits::default()).unwrap();
        assert_eq!(by_path(&index.tree), by_path(&tree));
        let expected = testing::files(&tree, |offset, length| {
            data[offset as usize..offset as usize + length].to_vec()
        });
        let expanded = testing::expanded(&index, &stored);
        let found = testing::files(&index.tree, |offset, length| {
            testing::read(&index, &expanded, offset, length)
        });
        let sorted = |files: Vec<(Vec<u8>, Vec<u8>)>| files.into_iter().collect::<BTreeMap<_, _>>();
        assert!(sorted(found) == sorted(expected), "files differ");
        let spans = index.content.spans.spans().len();
        println!(
            "estargz/{}: {spans} spans, tree and files as unpacked",
            name(&layer)
        );
    }
}
