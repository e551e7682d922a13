use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::Tagged;
use crate::control::{CpuBaseline, DeviceId, MemoryMode};
use crate::encoding::{EncodingError, decode, encode};

/// Variants of each shape, their tags in another order than theirs, with a gap.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(remote = "Self", rename_all = "lowercase")]
enum Shape {
    Unit,
    Newtype(u8),
    Tuple(u8, String),
    Struct { side: u32, inner: Vec<Shape> },
}

tags!(Shape {
    Unit "unit" = 300,
    Newtype "newtype" = 7,
    Tuple "tuple" = 0,
    Struct "struct" = 1,
});

fn shapes() -> [(Shape, Vec<u8>); 4] {
    let inner = vec![Shape::Unit, Shape::Newtype(9)];
    [
        (Shape::Unit, vec![0xac, 0x02]),
        (Shape::Newtype(5), vec![7, 5]),
        (Shape::Tuple(1, "a".into()), vec![0, 1, 1, b'a']),
        (Shape::Struct { side: 3, inner }, vec![1, 3, 2, 0xac, 0x02, 7, 9]),
    ]
}

#[test]
fn variants_encode_by_tag_whatever_their_order() {
    for (shape, bytes) in shapes() {
        assert_eq!(encode(&shape).unwrap(), bytes, "{shape:?}");
        assert_eq!(decode::<Shape>(&bytes).unwrap(), shape);
        assert_eq!(u32::from(bytes[0] & 0x7f), shape.tag() & 0x7f);
    }
}

#[test]
fn unknown_tags_are_named_with_their_place() {
    let unknown = |bytes: &[u8]| match decode::<Vec<Shape>>(bytes).unwrap_err() {
        EncodingError::UnknownTag { tag, at, .. } => (tag, at),
        other => panic!("{other}"),
    };
    assert_eq!(unknown(&[1, 2]), (2, 2));
    assert_eq!(unknown(&[2, 7, 7, 0xad, 0x02]), (301, 5));
    assert_eq!(unknown(&[1, 0xff, 0xff, 0xff, 0xff, 0x0f]), (u32::MAX, 6));
    let text = decode::<Shape>(&[2]).unwrap_err().to_string();
    assert_eq!(text, "Shape: unknown Shape tag 2, ending at byte 1");
}

#[test]
fn damaged_bytes_are_told_from_unknown_tags() {
    // Cut in its tag, and in its fields.
    for cut in [&[0xac][..], &[1, 3, 2]] {
        let error = decode::<Shape>(cut).unwrap_err();
        assert!(
            matches!(error, EncodingError::Malformed { at, .. } if at == cut.len()),
            "{error}"
        );
    }
    // A later failure of another kind is not reported as an unknown tag.
    assert!(matches!(
        decode::<Shape>(&[2]),
        Err(EncodingError::UnknownTag { .. })
    ));
    for other in [&[2][..], &[]] {
        let error = decode::<Result<(), String>>(other).unwrap_err();
        assert!(matches!(error, EncodingError::Malformed { .. }), "{error}");
    }
    let bytes = EncodingError::Trailing { what: "u8", bytes: 2 };
    assert_eq!(decode::<u8>(&[1, 2, 3]), Err(bytes));
}

#[test]
fn json_keeps_the_names_of_variants() {
    for (shape, _) in shapes() {
        let json = serde_json::to_string(&shape).unwrap();
        assert_eq!(serde_json::from_str::<Shape>(&json).unwrap(), shape, "{json}");
    }
    let json = |shape: &Shape| serde_json::to_string(shape).unwrap();
    assert_eq!(json(&Shape::Unit), r#""unit""#);
    assert_eq!(json(&Shape::Newtype(5)), r#"{"newtype":5}"#);
    assert!(serde_json::from_str::<Shape>(r#""Unit""#).is_err());
    assert!(serde_json::from_str::<Shape>("300").is_err());

    // As in records and the API.
    let disks: BTreeMap<DeviceId, u8> = [(DeviceId::Blk1, 1), (DeviceId::Blk3, 3)].into();
    let text = serde_json::to_string(&disks).unwrap();
    assert_eq!(text, r#"{"Blk1":1,"Blk3":3}"#);
    assert_eq!(
        serde_json::from_str::<BTreeMap<DeviceId, u8>>(&text).unwrap(),
        disks
    );
    let text = serde_json::to_string(&(CpuBaseline::Host, CpuBaseline::V3, MemoryMode::Populate)).unwrap();
    assert_eq!(text, r#"["host","x86-64-v3","populate"]"#);
    let read: (CpuBaseline, CpuBaseline, MemoryMode) = serde_json::from_str(&text).unwrap();
    assert_eq!(read, (CpuBaseline::Host, CpuBaseline::V3, MemoryMode::Populate));
}

#[test]
fn devices_encode_as_their_slots() {
    for device in DeviceId::ALL {
        assert_eq!(encode(&device).unwrap(), [device as u8]);
    }
}
