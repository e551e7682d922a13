//! Enums in messages and files: each variant has an explicit number, its *tag*, that does not depend on the
//! source order.
//!
//! serde's derive numbers variants by their order, so moving a variant, or adding one before others, changes
//! the meaning of old bytes. An encoded enum therefore derives with `#[serde(remote = "Self")]`, which
//! generates functions but no trait implementations, and [`tags!`](crate::tags!) implements serde's traits
//! with them:
//!
//! ```text
//! tags!(FreezeKind {
//!     Full = 0,
//!     Delta = 1,
//! });
//! ```
//!
//! Invariants: every variant has a tag, and no two have the same (both checked at compile time); decoding an
//! unknown tag fails. Binary formats ([`crate::encoding`]) use tags; JSON uses the variants' names.

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{self, Deserializer, EnumAccess, IntoDeserializer, Visitor};
use serde::ser::{Error as _, Impossible, Serialize, Serializer};

/// A variant's number and its serde name.
pub type Tag = (u32, &'static str);

/// An enum whose variants have tags. Only [`tags!`](crate::tags!) implements it.
pub trait Tagged {
    /// The tags of all variants.
    const TAGS: &'static [Tag];

    /// The tag of this variant.
    fn tag(&self) -> u32;

    /// The serde name of this variant, for messages.
    fn variant(&self) -> &'static str {
        let own = |(tag, _): &&Tag| *tag == self.tag();
        Self::TAGS.iter().find(own).map_or("", |(_, name)| name)
    }
}

/// Assigns tags to the variants of an enum: `tags!(Enum { Variant = 0, … })`. A variant with another serde
/// name states it: `Variant "name" = 0`. Never reuse a tag for another variant.
#[macro_export]
macro_rules! tags {
    ($type:ident { $($variant:ident $($name:literal)? = $tag:expr),+ $(,)? }) => {
        impl $crate::tags::Tagged for $type {
            const TAGS: &'static [$crate::tags::Tag] = &[$(($tag, $crate::tags!(@name $variant $($name)?))),+];

            fn tag(&self) -> u32 {
                match self {
                    $($type::$variant { .. } => $tag),+
                }
            }
        }

        const _: () = $crate::tags::assert_distinct(<$type as $crate::tags::Tagged>::TAGS);

        impl ::serde::Serialize for $type {
            fn serialize<S: ::serde::Serializer>(&self, serializer: S) -> ::core::result::Result<S::Ok, S::Error> {
                let tag = $crate::tags::Tagged::tag(self);
                $type::serialize(self, $crate::tags::TagSerializer::new(serializer, tag))
            }
        }

        impl<'de> ::serde::Deserialize<'de> for $type {
            fn deserialize<D: ::serde::Deserializer<'de>>(deserializer: D) -> ::core::result::Result<Self, D::Error> {
                if deserializer.is_human_readable() {
                    return $type::deserialize(deserializer);
                }
                let tags = <$type as $crate::tags::Tagged>::TAGS;
                $type::deserialize($crate::tags::TagDeserializer::new(deserializer, tags))
            }
        }
    };
    (@name $variant:ident) => { stringify!($variant) };
    (@name $variant:ident $name:literal) => { $name };
}

/// Panics, and so fails to compile in a constant, if two variants have the same tag.
pub const fn assert_distinct(tags: &[Tag]) {
    let mut one = 0;
    while one < tags.len() {
        let mut other = 0;
        while other < one {
            assert!(tags[one].0 != tags[other].0, "two variants have the same tag");
            other += 1;
        }
        one += 1;
    }
}

thread_local! {
    /// The enum and the unknown tag of the last failed decoding on this thread: postcard's errors carry no
    /// text.
    static UNKNOWN: Cell<Option<(&'static str, u32)>> = const { Cell::new(None) };
}

/// Takes the enum's name and the tag if the last decoding on this thread failed because of an unknown tag.
pub(crate) fn take_unknown() -> Option<(&'static str, u32)> {
    UNKNOWN.take()
}

/// Serializes one variant with its tag as the variant index.
pub struct TagSerializer<S> {
    inner: S,
    tag: u32,
}

impl<S> TagSerializer<S> {
    pub fn new(inner: S, tag: u32) -> TagSerializer<S> {
        TagSerializer { inner, tag }
    }
}

macro_rules! no_enum {
    ($($method:ident($($argument:ty),*) -> $answer:ty;)*) => {
        $(fn $method(self, $(_: $argument),*) -> Result<$answer, S::Error> {
            Err(S::Error::custom("an enum serializes as a variant"))
        })*
    };
}

impl<S: Serializer> Serializer for TagSerializer<S> {
    type Ok = S::Ok;
    type Error = S::Error;
    type SerializeSeq = Impossible<S::Ok, S::Error>;
    type SerializeTuple = Impossible<S::Ok, S::Error>;
    type SerializeTupleStruct = Impossible<S::Ok, S::Error>;
    type SerializeTupleVariant = S::SerializeTupleVariant;
    type SerializeMap = Impossible<S::Ok, S::Error>;
    type SerializeStruct = Impossible<S::Ok, S::Error>;
    type SerializeStructVariant = S::SerializeStructVariant;

    fn serialize_unit_variant(
        self,
        name: &'static str,
        _: u32,
        variant: &'static str,
    ) -> Result<S::Ok, S::Error> {
        self.inner.serialize_unit_variant(name, self.tag, variant)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        name: &'static str,
        _: u32,
        variant: &'static str,
        value: &T,
    ) -> Result<S::Ok, S::Error> {
        self.inner
            .serialize_newtype_variant(name, self.tag, variant, value)
    }

    fn serialize_tuple_variant(
        self,
        name: &'static str,
        _: u32,
        variant: &'static str,
        fields: usize,
    ) -> Result<S::SerializeTupleVariant, S::Error> {
        self.inner
            .serialize_tuple_variant(name, self.tag, variant, fields)
    }

    fn serialize_struct_variant(
        self,
        name: &'static str,
        _: u32,
        variant: &'static str,
        fields: usize,
    ) -> Result<S::SerializeStructVariant, S::Error> {
        self.inner
            .serialize_struct_variant(name, self.tag, variant, fields)
    }

    no_enum! {
        serialize_bool(bool) -> S::Ok;
        serialize_i8(i8) -> S::Ok;
        serialize_i16(i16) -> S::Ok;
        serialize_i32(i32) -> S::Ok;
        serialize_i64(i64) -> S::Ok;
        serialize_u8(u8) -> S::Ok;
        serialize_u16(u16) -> S::Ok;
        serialize_u32(u32) -> S::Ok;
        serialize_u64(u64) -> S::Ok;
        serialize_f32(f32) -> S::Ok;
        serialize_f64(f64) -> S::Ok;
        serialize_char(char) -> S::Ok;
        serialize_str(&str) -> S::Ok;
        serialize_bytes(&[u8]) -> S::Ok;
        serialize_none() -> S::Ok;
        serialize_unit() -> S::Ok;
        serialize_unit_struct(&'static str) -> S::Ok;
        serialize_seq(Option<usize>) -> Self::SerializeSeq;
        serialize_tuple(usize) -> Self::SerializeTuple;
        serialize_tuple_struct(&'static str, usize) -> Self::SerializeTupleStruct;
        serialize_map(Option<usize>) -> Self::SerializeMap;
        serialize_struct(&'static str, usize) -> Self::SerializeStruct;
    }

    fn serialize_some<T: Serialize + ?Sized>(self, _: &T) -> Result<S::Ok, S::Error> {
        self.serialize_none()
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        _: &T,
    ) -> Result<S::Ok, S::Error> {
        self.serialize_none()
    }

    fn is_human_readable(&self) -> bool {
        self.inner.is_human_readable()
    }
}

/// Reads a tag and passes the variant's name to the inner visitor.
pub struct TagDeserializer<D> {
    inner: D,
    tags: &'static [Tag],
}

impl<D> TagDeserializer<D> {
    pub fn new(inner: D, tags: &'static [Tag]) -> TagDeserializer<D> {
        TagDeserializer { inner, tags }
    }
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for TagDeserializer<D> {
    type Error = D::Error;

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        let tags = self.tags;
        self.inner.deserialize_enum(
            name,
            variants,
            ByTag {
                inner: visitor,
                name,
                tags,
            },
        )
    }

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, D::Error> {
        Err(de::Error::custom("an enum deserializes as a variant"))
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map struct identifier ignored_any
    }

    fn is_human_readable(&self) -> bool {
        self.inner.is_human_readable()
    }
}

/// Wraps the derived visitor, or its access to a variant, and replaces tags by names.
struct ByTag<T> {
    inner: T,
    /// The enum's name.
    name: &'static str,
    tags: &'static [Tag],
}

impl<'de, V: Visitor<'de>> Visitor<'de> for ByTag<V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.expecting(f)
    }

    fn visit_enum<A: EnumAccess<'de>>(self, access: A) -> Result<V::Value, A::Error> {
        let ByTag { inner, name, tags } = self;
        inner.visit_enum(ByTag {
            inner: access,
            name,
            tags,
        })
    }
}

impl<'de, A: EnumAccess<'de>> EnumAccess<'de> for ByTag<A> {
    type Error = A::Error;
    type Variant = A::Variant;

    fn variant_seed<S: de::DeserializeSeed<'de>>(self, seed: S) -> Result<(S::Value, A::Variant), A::Error> {
        let (tag, variant) = self.inner.variant_seed(PhantomData::<u32>)?;
        let named = self.tags.iter().find(|(known, _)| *known == tag);
        let Some((_, name)) = named else {
            UNKNOWN.set(Some((self.name, tag)));
            return Err(de::Error::custom(format_args!("there is no {} {tag}", self.name)));
        };
        Ok((seed.deserialize((*name).into_deserializer())?, variant))
    }
}

#[cfg(test)]
#[path = "tags_test.rs"]
mod tests;
