#include "quant/iq_grids.h"

namespace freshet::quant {
namespace {

// Two characters for an entry of 8 values with three levels (a character holds four base-3 digits)
// or of 4 values with eight levels (two base-8 digits), the first value in the lowest digit. '*' is
// zero.
constexpr char kZeroDigit = '*';

constexpr char kTextIQ2_XXS[] =
    R"(**,*.*0*2*4*6*<*>*B*D*F*H*N*T*X*Z*`*b*h*t*++-+3+7+E+c+o+*,,,>,b,+---3-=-?-E-G-K-W-a-)"
    R"(c-i-u-*.,.0.<.J.^.`.j.1/3/E/c/u/*0.00060B0F0H0N0P0f0-1E1,262+3-333=3E3W3c3i3m3*404<4)"
    R"(N4V4`4?5I5*606<6@6L6`697Y7*888+9-939E9a9*:.:r:O;*<,<2<H<X<`<b<C=K=*>,>+?-?3?E?S?*@F@)"
    R"(Z@iA0B<BlBHD+E-E3E9E=E?EEEKESEWEaEcEiE*F<FXF`FdF+G3GKGSG]G*H0H<H`HpH5I?I*J+K-K3KEKIK)"
    R"(*LTLXLbLIMiM*N0N4N:N<N`NfN-OGOuOjPiQkQ2R+SQS*T4T:TZTEU0V-W3WEW]W*XRX9YWY*Z.Z3[5[c[G])"
    R"(*`,`2`F`b`-a9aEa4b+c-c3c7cEcWc*dJdld1eEeWe,f-g4h-i3i?iEisi8j`jIk*l>lHlOmao<p,rNrdr1s)"
    R"(*t9uNx-y)";
constexpr char kTextIQ2_XS[] =
    R"(**,*.*0*2*4*6*8*:*<*>*@*B*F*H*J*L*N*P*R*T*X*Z*`*b*d*f*j*l*p*r*++-+/+1+3+5+7+9+;+=+?+)"
    R"(E+G+I+K+O+Q+W+]+a+c+i+*,,,.,0,4,6,<,F,H,N,R,`,h,+---/-1-3-5-7-9-=-?-E-G-I-K-O-Q-S-W-)"
    R"(a-c-i-*.,...0.4.6.<.F.H.N.X.`.+/-/3/A/E/G/c/*0,0.000204060<0@0F0H0N0T0`0r0z0+1-131E1)"
    R"(a1g1*2<2B2n2r2+3-3/31333537393=3?3E3G3I3K3O3Q3W3_3a3c3i3*4,4.4044464<4F4H4N4`4l4n4+5)"
    R"(-5/535E5W5*6,6.6064666<6F6H6L6N6Z6`6+7-737E7*868L8+9-93959E9Q9e9*:.:\:O;y;*<,<.<0<2<)"
    R"(4<6<<<F<H<N<`<r<+=-=3=E=K=[=*>>>`>x>+?-?3?C?E?*@F@P@p@+A;AwA*B0B2B<BRBfBtB]CiC0D<DbD)"
    R"(fDhD+E-E/E1E3E5E7E9E=E?EEEGEIEKEMEOEQEWE[EaEcEiE*F,F.F0F4F6F<FFFHFNF`FdFtF+G-G3G5GCG)"
    R"(EG*H,H.H0H4H6H:H<HFHHHNH`HlH+I-I3I?IEIqI*J2JHJNJ+K-K3KEKIKQKYK*L4LHLNL^L-M*N,N.N0N4N)"
    R"(6N<NBNFNHNNN`N+O-O3O7OEOGO*PHPzP+Q-Q3Q=QEQWQaQsQ*R0R`RfR=S]SsS*T6TFTNTpT;UEUGUdV+W-W)"
    R"(3WEWQWYWeWyW*X?YMYkY*Z8Z3[E[I[u[+]_]@^/_Q_Y_*`,`.`0`4`6`<`D`F`H`N```b`x`z`+a-a/a3aEa)"
    R"(OaUa*b<b`bbbrbxb+c-c3c5c7cEcWcgc*dHdvd9e_e*f0f@fVf`fbfxf/g>h`hfhnhxh+i-i3iEiSici*j>j)"
    R"(ZjSkgk*l.lHlNlTlCmimkmFnOowoLp7qWq*r,r0r2r<rDrrrOsUsws*t,t0tDt`trtEumu[wow2x<x>xBxrx)"
    R"(xx-ycyeyBzDzjzzz)";
constexpr char kTextIQ2_S[] =
    R"(**,*.*0*2*4*6*8*:*<*>*@*B*F*H*J*L*N*P*R*T*X*Z*\*^*`*b*d*f*j*l*r*v*z*++-+/+1+3+5+7+9+)"
    R"(=+?+E+G+I+K+O+Q+S+U+W+[+]+a+c+i+k+m+s+u+*,,,.,0,4,6,<,D,F,H,J,L,N,R,`,d,h,l,t,+---/-)"
    R"(1-3-5-7-9-=-?-A-C-E-G-I-K-M-O-Q-S-U-W-Y-[-a-c-e-g-i-m-o-s-u-*.,...0.2.4.6.8.:.<.@.B.)"
    R"(F.H.J.L.N.P.R.T.X.Z.`.b.d.f.j.l.r.+/-///1/3/7/E/I/K/O/Q/W/a/c/i/*0,0.000406080:0<0@0)"
    R"(D0F0H0J0L0N0P0R0T0X0Z0`0d0l0z0+1-131517191=1E1I1K1O1Q1W1a1i1*24262>2B2D2N2p2+3-3/313)"
    R"(33537393=3?3A3E3G3I3K3O3Q3S3U3W3Y3[3]3a3c3e3i3m3o3s3u3*4,4.40424446484:4<4>4@4B4F4H4)"
    R"(J4L4N4P4R4T4X4Z4`4b4d4f4j4l4+5-5153575=5?5E5I5O5Q5a5c5i5*6,6.606466686:6<6@6B6F6H6J6)"
    R"(L6N6P6R6T6X6Z6`6b6d6f6j6l6r6+7-7/71737577797=7?7E7G7I7K7O7Q7W7a7c7i7*8.8084868<8F8H8)"
    R"(N8`8z8+9-9/919397999=9E9G9I9K9O9Q9W9a9c9*:,:.:0:4:6:<:F:H:N:^:t:-;3;E;S;*<,<.<0<4<6<)"
    R"(8<:<<<@<D<F<H<N<P<R<Z<`<h<l<z<+=-=3=5=7===E=G=I=O=Q=W=a=c=i=*>2>>>B>D>H>N>f>h>x>+?-?)"
    R"(/?1?3?7?9?=???E?G?I?K?O?Q?W?a?c?i?*@.@0@4@6@<@F@H@N@\@`@+A-A3AEAUA*B.B4B6BFBHBNBhBzB)"
    R"(+C-C3CmC2D>DZDfDhD+E-E/E1E3E5E7E9E;E=E?EAEEEGEIEKEMEOEQESEUEWEYE[EaEcEiEmEoEsEuE*F,F)"
    R"(.F0F4F6F8F:F<F>F@FFFHFJFLFNFPFRFTFXFZF`FbFdFfFjFlFrF+G-G3G5G7G9G?GEGIGKGOGQGWGaGcG*H)"
    R"(,H.H0H2H4H6H8H:H<H>H@HBHFHHHJHLHNHPHRHTHXHZH`HbHdHfHjHlHrH+I-I/I1I3I5I7I9I=I?IEIGIII)"
    R"(KIOIQIWI_IaIcIiI*J,J.J0J4J6J<JFJHJNJ`JvJ+K-K1K3K5K7K9K=K?KEKGKIKKKOKQKWKcKiK*L,L.L0L)"
    R"(4L6L<LFLHLNL`LnL+M-M3MEM*N,N.N0N4N6N8N:N<N>N@NBNFNHNJNLNNNPNRNTNXNZN`NbNdNfNjNlN+O-O)"
    R"(/O1O3O5O7O9O=O?OEOGOIOKOOOQOWOaOcOiO*P.P0P4P6P<PFPHPNP^P`P+Q-Q/Q1Q3Q5Q7Q9Q=Q?QEQGQIQ)"
    R"(KQOQQQWQaQcQiQ*R,R.R0R4R6R<RFRHRNR`R+S-S3SASES*T,T.T0T4T6T<TFTHTNTVT`T+U-U3UEU*V:VdV)"
    R"(xV+W-W/W3W5W7W9W=W?WEWIWKWOWQWWWcWiW*X,X.X0X4X6X<XFXHXNX`XpX-Y3YEYSYsY*Z.Z0Z4Z6Z<ZFZ)"
    R"(HZNZ`Z+[-[3[E[M[][k[*\l\+]-]3][]o]*^D^G_s_*`,`.`0`4`6`:`<`@`F`H`N`P`R`T`X```d`j`l`+a)"
    R"(-a1a3a5a7a9a=a?aEaGaIaKaOaQaaacaiaya*b.b2b4b6bFbHbNb+c-c/c1c3c5c7c9c=cEcGcIcKcOcQcWc)"
    R"(acccic*d,d.d0d4d6d<dFdHdNd`dhd+e-e3eCeEe*f.f4f6fFfHfNftf+g-gEg[g>hThVhbhth+i-i1i3i5i)"
    R"(7i9i?iEiGiIiKiOiQiWiaiciii*j.j4j6jFjHjNjVj+k-k3kEkwk*l,l.l0l4l6l<lFlHlNl`lnl+m-m3mEm)"
    R"(omsm*nJnZn+o-o3oAoEoyo*pLpPpiq*r.r2r6r>rDrFrHrNrtrzrEs[s,t2t>tBtDtbtfthtxt+u-u3uEugu)"
    R"(uu*v:vOw2xBxtxQyey0z2z<z>zBzfzzz)";
constexpr char kTextIQ1_S[] =
    R"(**,*.*0*2*4*7*<*>*B*D*I*O*Q*S*[*`*b*f*h*m*r*t*x*z*-+.+4+6+8+:+;+@+F+J+L+P+R+V+X+Z+\+)"
    R"(]+d+j+l+n+v+*,,,0,2,7,<,>,B,D,I,O,U,Z,^,`,b,f,h,j,m,p,r,t,x,z,4-6-8-@-F-L-R-V-Z-[-j-)"
    R"(p-v-+.-.../.7.9.;.C.E.I.M.N.O.Q.R.S.U.W.Y.[.]._.a.j.m.o.q.s.u.v.w.y.6/:/F/H/N/P/R/T/)"
    R"(W/X/\/^/d/j/l/p/*0,0002070<0>0B0D0I0O0S0[0`0b0f0h0m0r0t0x0z0.14161:1?1@1F1N1O1R1X1Z1)"
    R"(^1j1l1n1p1v1*2,2022272<2>2B2D2I2O2U2X2[2`2b2d2f2h2m2r2t2x2z2334363:3?3@3F3H3N3R3T3X3)"
    R"(Z3[3^3j3l3n3s3v3+4-4/41434547494=4?4C4I4M4N4O4P4Q4R4S4U4W4[4c4k4m4s4u4456585@5E5J5L5)"
    R"(P5R5T5V5Z5\5d5j5l5n5v5+6/616667696:6=6A6F6I6J6K6M6O6Q6R6S6U6Y6[6]6c6g6i6l6m6o6p6q6s6)"
    R"(u6v6y6,7.72747677787:7<7>7@7B7D7F7H7I7J7O7P7Q7R7S7U7V7X7Z7[7\7^7`7b7c7d7f7h7i7j7l7m7)"
    R"(n7p7q7r7t7v7+8-8.8/8788898;8=8A8E8G8H8I8K8M8O8R8S8T8U8X8Z8[8]8^8_8e8h8k8m8u8y84989@9)"
    R"(F9H9J9L9N9R9T9V9W9X9Z9\9^9d9j9l9v93:5:7:;:=:@:G:H:I:K:O:Q:R:S:U:V:W:[:_:g:j:k:m:o:s:)"
    R"(w:y:1;8;?;A;H;J;L;N;P;R;T;X;\;^;d;j;n;q;*<,<0<2<7<<<><@<B<D<I<O<U<X<[<`<b<f<h<m<r<t<)"
    R"(v<x<z<.=4=6=:=@=G=H=L=R=T=V=X=Z=[=\=d=i=n=p=v=+>0>2>4>7><>>>B>D>I>O>S>U>[>a>f>h>j>m>)"
    R"(r>t>x>z>.?6?8?:?@?H?I?J?L?P?R?T?V?\?d?j?l?p?s?v?1@7@=@C@E@I@K@O@Q@R@U@Y@[@]@g@i@l@m@)"
    R"(o@q@s@u@w@y@.A3A5A:A@AFALARAWAXA^AcAeAiAqA*B,B0B2B7B<B>BBBDBIBOBQB[B`BbBfBhBrBtBxBzB)"
    R"(1C4C6C:C@CJCLCPCRCXCZC\C^CdCiCnCpCuCvC*D,D0D2D<D>DBDDDIDODSDUD[D`DbDfDhDmDrDtDxDzD.E)"
    R"(4E8E@ELEPERETEVEXEZE\ElEpEsEwE*F+F-F/F1F5F7F8F9F;F=FAFCFIFKFMFOFQFRFSFUFVF[F]F_FaFcF)"
    R"(eFiFkFmFrFsFtF.G4G6G8G@GFGPGRGVGZG^GgGlGvG+H7H:HCHIHKHMHOHQHRHSHXHYH[H]H_HaHeHgHiHkH)"
    R"(mHrHsHyH+I,I.I2I4I6I7I8I:I<I@IDIFIHIIIJILINIOIQIRISITIUIXIZI[I\I^IbIcIdIfIjIlImInIpI)"
    R"(qIvIxIzI+J.J1J6J7J9J;J=J?JCJEJGJIJKJNJOJPJRJSJUJYJ[J]JaJdJhJlJmJsJuJwJ.K4K7K;K@KGKLK)"
    R"(NKRKTKXKZK\K^KdKjKlKnKpKvK+L.L/L2L3L6L7L9L=L?LALELILMLOLPLQLRLSLULWLYL[L\L_LeLgLkLmL)"
    R"(nLoLsLuLwLyL8MHMJMLMRMTMVMZM^MlMvM+N-N.N/N1N5N7N;N=N?NCNENINKNONQNRNSNUN[N]NeNgNmNoN)"
    R"(rNsNwNyN.O0O1O2O4O6O7O8O9O:O<O@OAOBODOFOHOIOJOLONOOOPOQOROSOTOUOVOXOZO[O\O^ObOdOjOlO)"
    R"(mOnOpOrOvOzO+P/P5P7P;P=P?PGPIPMPOPQPRPSPUPYP[PdPiPkPmPpPqPuP-Q.Q4Q6Q7Q8Q9Q:Q=Q@QBQDQ)"
    R"(FQHQIQJQLQMQNQOQQQRQSQTQUQVQXQYQZQ[Q\Q^Q`QfQhQjQlQmQnQpQsQuQvQzQ+R,R-R.R/R1R3R4R5R6R)"
    R"(7R8R:R;R=R?R@RARCRERFRGRHRIRJRKRLRNRORPRQRRRSRTRURVRWRXRZR[R\R]R^R_RaRcRdRgRhRiRjRlR)"
    R"(mRnRoRpRsRuRvRwRyR*S+S,S-S/S0S1S4S6S7S9S:S<S=S>S?S@SASBSCSFSISJSKSLSMSNSOSPSQSRSSSTS)"
    R"(USVSXSZS[S^SbSdSeSfSgShSjSmSqStSvSwSxSyS-T.T/T1T3T7T9T=TDTITKTMTOTQTRTSTTTUTWTYTZT[T)"
    R"(bTgTiTkTmToTsTyT+U,U.U2U4U6U7U8U:U@UFUHUIUJULUNUOUPUQURUSUTUUUVUXUZU[U\U^UaUdUgUjUlU)"
    R"(mUnUoUpUvU-V0V7V;V<V@VAVCVIVKVLVOVRVSVTVUVYV[V]V_VaVhVkVmVnVoVqVsV.W6W8W:W@WHWNWRWSW)"
    R"(TWVWXWZW\W^WaWnWvW+X-X/X1X5X7X=X>XAXCXIXLXOXRXSXUX[X\X_XcXhXkXmXsXwXyX4Y8Y:YEYFYJYRY)"
    R"(SYTYWYdYjYnYvY4Z5Z7Z8Z;Z=ZAZCZEZGZIZKZMZOZQZRZSZUZVZWZYZ[ZcZdZgZiZkZlZmZnZoZqZsZuZyZ)"
    R"(.[0[2[4[7[8[:[H[I[J[L[N[O[Q[R[S[U[X[Z[[[\[^[e[g[h[j[m[n[p[q[t[v[w[x[,\1\7\<\A\B\C\E\)"
    R"(I\K\M\O\Q\R\S\T\V\W\[\]\`\b\d\h\l\n\o\p\r\u\w\z\8]:]@]F]P]R]V]X]^]d]j]o]w]+^-^3^7^=^)"
    R"(?^A^C^E^F^I^J^K^O^Q^R^S^U^W^[^_^b^c^h^m^s^u^v^y^4_8_9_F_H_L_N_R_T_V_Z_[_^_e_l_o_q_w_)"
    R"(*`,`0`2`<`>`B`D`I`N`O`Q`S`U`[```b`f`h`m`r`t`x`z`.a4a6a8a:a@aFaHaLaNaPaRaSaTaUaZa\a^a)"
    R"(dagalanapava*b,b0b2b7b<b>bBbDbObQbUb[b`bbbfbhbmbrbtbxbzb6c:cFcHcOcRcVcXcZc^clcpc+d1d)"
    R"(5d7d;dAdCdEdFdIdKdOdQdRdSdUdVd[d\d]d_dadcdedgdidkdmdodwd4e8e:e@eFeHeLeMeNeReUeVeXe\e)"
    R"(_edejeqeue*f,f0f2f7f<f>fBfDfFfIfOfQfUf[f^f`fbfffhfmfrftfxfzf.g/g4g6g8g@gFgHgJgLgNgPg)"
    R"(RgVgXgZgdgngpgvg*h,h0h2h7h<h>hBhDhIhOhQhSh`hbhfhhhmhrhthxhzh.i4i8i9i:i@iFiJiLiRiTiVi)"
    R"(^i_idijilinipivi+j-j/j1j3j7j9j;j=j?jAjCjEjIjNjOjQjRjSjUjYj[jcjejkjmjojsjujwjyj.k4k6k)"
    R"(:k@kHkJkLkNkPkRkTk\k^kdklknkyk+l-l/l3l7l9lAlElMlOlQlRlSlTlUlWlXlYl[lclelklllmlolslyl)"
    R"(*m.m0m2m3m4m6m7m8m:m=m@mCmDmFmHmImJmLmNmOmPmQmRmSmTmUmVmXmZm[m\m^mamdmfmjmkmlmmmnmpm)"
    R"(qmrmtmvmxmzm+n-n3n7n:n<nAnCnInKnLnOnPnRnSnUn[n]nbncngnhnknlnmnunwnyn.o8o:o@oFoJoNoPo)"
    R"(RoSoVoZo[odojonopovo-p/p1p3p5p7p9p;p<p=p?pApEpGpIpKpMpOpQpRpSpUpYp[p\p_papcpipkpmpqp)"
    R"(spwp.q7q@qHqJqLqNqRqTqXqdqjqlqmqnq*r,r0r2r7r<r>rBrDrIrOrQrSrUr`rbrfrhrmrrrtrxrzr.s1s)"
    R"(4s6s8s:s;sJsLsOsRsTsVsXsZsdsisksnsps,t0t2t3t:t>tBtDtItOtStUt[t`tbtfthtmtrtttxtzt:u@u)"
    R"(FuHuNuQuRuTuVuXu[u\u]u^udu/v1v3v5v7v9vAvCvGvIvOvQvRvSvUv[v_vavcvdvevgvkvmvov.w4w8w;w)"
    R"(=w@wHwJwMwPwRwSwTwWwYwewiwmwnwpwswuwww*x,x0x2x<x>xBxDxOxQxSxUx`xbxfxhxmxrxtxxxzx.y6y)"
    R"(:y=y@yFyNyRyVyXy\y^yiyny*z,z0z2z<z>zBzDzOzQzSz`zbzfzhzmzrztzxzzz)";
constexpr char kTextIQ3_XXS[] =
    R"(**,*.*3*5*9*:*<*C*L*e*g*++-+2+4+;+?+B+D+K+V+b+*,,,.,3,:,<,C,E,I,S,Y,g,+-1-2-4-?-b-5.)"
    R"(I.N.Y.e.g.+/1/D/T/G0^0216181M1[1+2-22242;2=2B2D2F2Q2R2*3,333:3<3+4-42444;4B4d4*5,5:5)"
    R"(C5P5`5+6/6R6:7>7P7c7/8<9J9*:,:3:5:::<:@:C:L:+;-;/;2;4;;;B;];a;b;*<,<3<9<:<<<I<J<W<+=)"
    R"(2=6=b=f=G>U>-?A?K?f?+A-A8AOA+B2B4B;B=BRB_BdB*C,C:CCCNCPC+D-D2D?DTDdD3EEEBFQFdF*G0G<G)"
    R"(WG6HHH]HEIZI.J9JGJIJUJYJfK:LILJLZL`L1MOM.NSN^N?OMObO/Q2Q4QBQ4RKRbR*S0S@SWS6TDTdT,UUU)"
    R"(2V=VAVdV,WCWRX>YLY>ZNZPZ^Z;[[[9\^\B]H]N^/_T_E`-a;a-b/b1b2bDbTb@cJc4dOdTd*e7eEeZe;fKf)"
    R"(*g,g>gBh)";
constexpr char kTextIQ3_S[] =
    R"(**+*,*/*1*2*3*4*6*8*:*;*?*E*J*L*O*Q*S*U*Z*\*c*f*i**+++,+.+2+3+7+:+=+A+C+G+N+[+_+d+*,)"
    R"(+,/,1,2,5,8,;,?,B,F,L,O,Q,S,U,b,e,--3-7-:-<-C-E-H-N-R-T-a-c-g-*.5.9.;.>.D.J.M.S.b.,/)"
    R"(./:/</@/E/K/O/Q/`/e/003050C0T0c0*1,1.1:1<1@1E1R1V1*2+2,2.22232527292:2<2C2F2H2V2X2[2)"
    R"(d2*3+3-3032363;3B3E3K3R3T3b3h3*4447494:4>4D4J4M4W4Z4d4+5.5152555;5A5B5F5K5\5b5-6/646)"
    R"(66C6E6L6P6R6V6+72757;7B7D7S7:8>8A8N8P8+9-92949;9G9K9\9b9*:+:-:/:1:2:4:6:8:;:=:A:B:D:)"
    R"(K:M:O:R:T:a:b:e:g:*;,;2;5;9;<;?;C;F;L;S;+<.<1<;<=<B<I<K<U<Y<c<f<*=,=/=3=<=>=C=E=L=R=)"
    R"(`=+>1>:>=>D>G>K>d>g>.?3?<?I?J?U?b?*@,@1@;@W@[@/A3A@ABAMARA,B3B5B7B9B<BCBEBGBLBNBQBSB)"
    R"(]BcB+C-C/C6C;C=CJCZCdChC*D4D:DDDFDRD+E2E6E;E=EAEBEKEMEQEWEeE-F3F8F<FCFTFZF^F+G2G4G?G)"
    R"(DGNGXGeG8HKH+I-I:I<IGI*J.J4J:J>JAJDJKJRJbJ,K1K3K5K<KBKGKMKSKWK+L-L2L7L;LELJLYL\LbL.M)"
    R"(3M5M:M<MCMGM*N,N>NINJNcN/O1O;O\O5PFPZP2Q7QBQMQSQ,R2R6R<RJRNRQRTR`RfR+S-S/S4S;SDSdS*T)"
    R"(3T=TBTHTUT,U1U2UAUNUSU_UeU+V.V:VDVPV4W@WSWUWLX,Y.Y<Y3Z5Z7ZCZEZZZ*[:[A[^[4\F\L\W\\\b\)"
    R"(*]6];]J]?^M^\^*_-_F_Z_/`J`3a5a*b.b1b:b<bHbJbVb\b,c3c>cMcOc+d.d2d8d;dBdSd,eDeGeUe+f/f)"
    R"(5f:fRf<gLg,hCh*i)";

template <int kLevels, int kEntries, int kQuads, int kChars>
constexpr IqGrid<kEntries, kQuads> expand(const char (&text)[kChars],
                                          const uint8_t (&levels)[kLevels]) {
  static_assert(kChars == 2 * kEntries + 1);
  constexpr int kDigits = 2 * kQuads;  // of a character
  IqGrid<kEntries, kQuads> grid{};
  for (int i = 0; i < 4 * kQuads * kEntries; i += kDigits) {
    int digits = text[i / kDigits] - kZeroDigit;
    for (int k = i; k < i + kDigits; ++k, digits /= kLevels) {
      grid.quads[k / 4] |= uint32_t{levels[digits % kLevels]} << (8 * (k % 4));
    }
  }
  return grid;
}

constexpr uint8_t kLevels2[] = {8, 25, 43};
constexpr uint8_t kLevels3Xxs[] = {4, 12, 20, 28, 36, 44, 52, 62};
constexpr uint8_t kLevels3S[] = {1, 3, 5, 7, 9, 11, 13, 15};
constexpr uint8_t kLevels1[] = {0, 1, 2};

}  // namespace

constinit const IqGrid<256, 2> kGridIQ2_XXS = expand<3, 256, 2>(kTextIQ2_XXS, kLevels2);
constinit const IqGrid<512, 2> kGridIQ2_XS = expand<3, 512, 2>(kTextIQ2_XS, kLevels2);
constinit const IqGrid<1024, 2> kGridIQ2_S = expand<3, 1024, 2>(kTextIQ2_S, kLevels2);
constinit const IqGrid<256, 1> kGridIQ3_XXS = expand<8, 256, 1>(kTextIQ3_XXS, kLevels3Xxs);
constinit const IqGrid<512, 1> kGridIQ3_S = expand<8, 512, 1>(kTextIQ3_S, kLevels3S);
constinit const IqGrid<2048, 2> kGridIQ1 = expand<3, 2048, 2>(kTextIQ1_S, kLevels1);

}  // namespace freshet::quant
